"""A prefill and a decode server, with one of SGLang's transfer backends between them.

By default that is mooncake over TCP on the CPU platform, where a stand-in takes the place of its package.
There is no router: a request goes to both servers, under one room.
"""

from __future__ import annotations

import http.client
import itertools
import os
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_sglang.demo.server import Server, free_port
from tests.support.engines import LAUNCH, READY_TIMEOUT, _started
from tests.support.transfer.mooncake.engine import FAULT_ENV, UNREGISTERED

TRANSFER = Path(__file__).parent / "transfer"
STAND_IN = "mooncake_tcp"  # the backend whose package has the stand-in
_rooms = itertools.count(1)


class Refused(Exception):
    """An answer with an HTTP status other than 200; the message is its body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(body)
        self.status = status


@dataclass(frozen=True)
class Launch:
    """How the servers are started: SGLang's transfer backend, the file of the stand-in's faults, flags of both."""

    backend: str
    fault: Path
    shared: Mapping[str, Any]

    def server(
        self, role: str, target: Path, draft: Path | None, bootstrap_port: int, arguments: Mapping[str, Any]
    ) -> AbstractContextManager[Server]:
        """arguments: more flags, and `environment`; `draft` overrides the other one."""
        flags = {"draft": draft, "environment": {}, "fresh": False, **self.shared, **arguments}
        draft, variables, fresh = flags.pop("draft"), flags.pop("environment"), flags.pop("fresh")
        path, environment = variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")), {}
        if self.backend == STAND_IN:
            path = os.pathsep.join(filter(None, [str(TRANSFER), path]))
            environment = {FAULT_ENV: str(self.fault)}
        environment = {**variables, **environment, "PYTHONPATH": path, "SGLANG_HOST_IP": "127.0.0.1"}
        flags |= dict(
            disaggregation_mode=role,
            disaggregation_transfer_backend=self.backend,
            disaggregation_bootstrap_port=bootstrap_port,
        )
        return _started(target, draft, environment, LAUNCH, fresh, flags)


class Apart:
    """A prefill server, a decode server, and what clients and a router send to both."""

    def __init__(self, prefill: Server, decode: Server, bootstrap_port: int, launch: Launch) -> None:
        self.prefill, self.decode, self.bootstrap_port, self.launch = prefill, decode, bootstrap_port, launch

    def ask(self, *, of: str = "decode", **request: Any) -> dict[str, Any]:
        """The answer of one server, `of` prefill or decode. Raises Refused where it has another status."""
        both = self.ask_both(**request)
        if isinstance(answer := both[of == "decode"], Refused):
            raise answer
        return answer

    def ask_both(self, **request: Any) -> tuple[Any, Any]:
        """The answers of the prefill and of the decode server, or the `Refused` of each."""
        sent = {**request, **self.room()}
        with ThreadPoolExecutor(2) as pool:
            prefill, decode = (pool.submit(answer_of, one, **sent) for one in (self.prefill, self.decode))
            return prefill.result(), decode.result()

    def room(self) -> dict[str, Any]:
        """Where the two servers meet for one request."""
        return dict(bootstrap_host="127.0.0.1", bootstrap_port=self.bootstrap_port, bootstrap_room=next(_rooms))

    def ask_all(
        self, requests: Sequence[Mapping[str, Any]], refused: bool = False, at_once: int | None = None
    ) -> list[Any]:
        """The answers to requests that are there at once, all or so many at a time; `refused`: also a `Refused`,
        in place of raising it."""
        ask = self.ask if not refused else lambda **one: self.ask_both(**one)[1]
        with ThreadPoolExecutor(at_once or len(requests)) as pool:
            return list(pool.map(lambda one: ask(**one), requests))

    def ask_later(self, **request: Any) -> Future[Any]:
        """The decode server's answer to come."""
        pool = ThreadPoolExecutor(1)
        answer = pool.submit(lambda: self.ask_both(**request)[1])
        pool.shutdown(wait=False)
        return answer

    @contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """In which transfers have a fault of the stand-in's."""
        self.launch.fault.write_text(kind)
        try:
            yield
        finally:
            self.launch.fault.write_text("")

    def assert_idle(self) -> None:
        """Both servers end what they do, and find every slot free."""
        for server in (self.prefill, self.decode):
            server.post("/flush_cache?timeout=60")
            assert "leak" not in server.log_text()

    def wrote_elsewhere(self) -> bool:
        """Whether a transfer had an address outside of registered memory."""
        return any(UNREGISTERED in server.log_text() for server in (self.prefill, self.decode))


def answer_of(server: Server, **request: Any) -> Any:
    """One server's answer, or the `Refused` of it; status 0 where the server has broken off."""
    try:
        return server.generate(**request)
    except urllib.error.HTTPError as error:
        return Refused(error.code, error.read().decode())
    except (OSError, http.client.HTTPException) as error:
        return Refused(0, str(error))


@contextmanager
def prefill_beside(
    apart: Apart, target: Path, draft: Path | None, bootstrap_port: int | None = None, **arguments: Any
) -> Iterator[Apart]:
    """One more prefill server for the decode server of `apart`, ready. bootstrap_port: by default a free one.

    arguments: beside those that the servers of `apart` share."""
    port = bootstrap_port or free_port()
    with apart.launch.server("prefill", target, draft, port, arguments) as server:
        server.wait_ready(READY_TIMEOUT)
        yield Apart(server, apart.decode, port, apart.launch)


@contextmanager
def decode_beside(apart: Apart, target: Path, draft: Path | None, **arguments: Any) -> Iterator[Apart]:
    """One more decode server for the prefill server of `apart`, ready. arguments: see `prefill_beside`."""
    with apart.launch.server("decode", target, draft, apart.bootstrap_port, arguments) as server:
        server.wait_ready(READY_TIMEOUT)
        yield Apart(apart.prefill, server, apart.bootstrap_port, apart.launch)


@contextmanager
def serve_apart(
    target: Path,
    draft: Path | None,
    directory: Path,
    *,
    backend: str = STAND_IN,
    environment: Mapping[str, str] | None = None,
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    **shared: Any,
) -> Iterator[Apart]:
    """Both servers, ready. prefill, decode: arguments of one of them; `draft` and `environment` may be there.

    backend: as of --disaggregation-transfer-backend."""
    launch, port = Launch(backend, directory / "fault", shared), free_port()
    with ExitStack() as stack:
        servers = []
        for role, own in (("prefill", prefill or {}), ("decode", decode or {})):
            asked = {**own, "environment": {**(environment or {}), **own.get("environment", {})}}
            servers.append(stack.enter_context(launch.server(role, target, draft, port, asked)))
        for server in servers:
            server.wait_ready(READY_TIMEOUT)
        try:
            yield Apart(servers[0], servers[1], port, launch)
        finally:
            print(*(server.log_tail(60) for server in servers), sep="\n")  # shown with a failure
