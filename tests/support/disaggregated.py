"""A prefill and a decode server on the CPU platform, with a stand-in for the transfer engine between them.

There is no router: a request goes to both servers, under one room.
"""

from __future__ import annotations

import itertools
import json
import os
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from dflash_sglang.demo.server import Server, free_port
from tests.support.engines import LAUNCH, READY_TIMEOUT, _started
from tests.support.transfer.mooncake.engine import FAULT_ENV, UNREGISTERED

TRANSFER = Path(__file__).parent / "transfer"
_rooms = itertools.count(1)


class Refused(Exception):
    """An answer with an HTTP status other than 200; the message is its body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status = status


class Apart:
    """A prefill server, a decode server, and what clients and a router send to both."""

    def __init__(self, prefill: Server, decode: Server, bootstrap_port: int, fault: Path) -> None:
        self.prefill, self.decode = prefill, decode
        self._bootstrap_port, self._fault = bootstrap_port, fault

    def ask(self, *, of: str = "decode", **request: Any) -> dict[str, Any]:
        """The answer of one server, `of` prefill or decode. Raises Refused where it has another status."""
        both = self.ask_both(**request)
        if isinstance(answer := both[of == "decode"], Refused):
            raise answer
        return answer

    def ask_both(self, **request: Any) -> tuple[Any, Any]:
        """The answers of the prefill and of the decode server, or the `Refused` of each."""
        sent = dict(request, bootstrap_host="127.0.0.1", bootstrap_port=self._bootstrap_port)
        sent["bootstrap_room"] = next(_rooms)
        with ThreadPoolExecutor(2) as pool:
            prefill, decode = (pool.submit(answer_of, one, **sent) for one in (self.prefill, self.decode))
            return prefill.result(), decode.result()

    def ask_all(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The answers to requests that are there at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda one: self.ask(**one), requests))

    @contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """In which transfers have a fault of the stand-in's."""
        self._fault.write_text(kind)
        try:
            yield
        finally:
            self._fault.write_text("")

    def logs(self) -> str:
        return self.prefill.log_text() + self.decode.log_text()

    def tails(self) -> str:
        return "\n".join(server.log_tail(60) for server in (self.prefill, self.decode))

    def wrote_elsewhere(self) -> bool:
        """Whether a transfer had an address outside of registered memory."""
        return UNREGISTERED in self.logs()


def answer_of(server: Server, **request: Any) -> Any:
    """One server's answer, or the `Refused` of it."""
    try:
        return server.generate(**request)
    except urllib.error.HTTPError as error:
        return Refused(error.code, error.read().decode())


def role_environment(environment: Mapping[str, str] | None, fault: Path) -> dict[str, str]:
    python_path = (environment or {}).get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {
        **(environment or {}),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TRANSFER), python_path])),
        "SGLANG_HOST_IP": "127.0.0.1",
        FAULT_ENV: str(fault),
    }


@contextmanager
def serve_apart(
    target: Path,
    draft: Path | None,
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Iterator[Apart]:
    """Both servers, ready. prefill, decode: arguments of one of them, `draft` and `environment` among them."""
    bootstrap_port, fault = free_port(), directory / "fault"
    common = dict(disaggregation_transfer_backend="mooncake_tcp", disaggregation_bootstrap_port=bootstrap_port)
    with ExitStack() as stack:
        servers = []
        for role, own in (("prefill", prefill), ("decode", decode)):
            asked = {"draft": draft, **arguments, **(own or {})}
            variables = {**(environment or {}), **asked.pop("environment", {})}
            checkpoint = asked.pop("draft")
            started = _started(
                asked.pop("target", target),
                checkpoint,
                role_environment(variables, fault),
                LAUNCH,
                False,
                {**common, **asked, "disaggregation_mode": role},
            )
            servers.append(stack.enter_context(started))
        for server in servers:
            server.wait_ready(READY_TIMEOUT)
        apart = Apart(*servers, bootstrap_port, fault)
        yield apart
        print(apart.tails())  # shown with a failure


def errors_of(refused: Refused) -> str:
    """The message of a refusal, out of SGLang's JSON."""
    return json.loads(str(refused))["error"]["message"]
