"""One SGLang server: asked over HTTP, and as a process started, awaited, and ended with everything it started."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

PORTS = range(12000, 32000)
# Straight to the server, whatever proxy the environment names.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(RuntimeError):
    """The server process ended, did not become ready, or left a request without its answer."""


def free_port() -> int:
    """Returns a TCP port of the loopback interface that was free a moment ago.

    It lies below the range from which systems give out ports: a server listens long after it has opened sockets of
    its own, none of which may take its port.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port of 127.0.0.1 is free from {PORTS.start} to {PORTS.stop - 1}")


class Client:
    """The requests of a running server at `url`, such as http://127.0.0.1:30000."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")

    def get(self, path: str) -> Any:
        """Returns the decoded JSON body of GET `path`, or None when the body is empty."""
        body = self.text(path)
        return json.loads(body) if body else None

    def text(self, path: str) -> str:
        """Returns the body of GET `path`."""
        with _DIRECT.open(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def generate(self, **request: Any) -> Any:
        """POST /generate; `request` holds SGLang's fields (`text` or `input_ids`, `sampling_params`, ...)."""
        with _DIRECT.open(self._request("/generate", request), timeout=600) as answer:
            return json.loads(answer.read())

    def stream(self, **request: Any) -> Iterator[dict[str, Any]]:
        """Same as `generate`, with `stream`; yields each event's object, cumulative as SGLang sends it.

        Raises ServerFailed where the server refuses the request or does not end its answer.
        """
        whole = False
        with _DIRECT.open(self._request("/generate", {**request, "stream": True}), timeout=600) as answer:
            with suppress(http.client.IncompleteRead):
                for line in answer:
                    whole = whole or line.strip() == b"data: [DONE]"
                    if line.startswith(b"data:") and not whole:
                        event = json.loads(line[len(b"data:") :])
                        if "error" in event:
                            raise ServerFailed(f"the server refused the request: {event['error']}")
                        yield event
        if not whole:
            raise ServerFailed("the server broke off its answer: expected a stream that ends with [DONE]")

    def post(self, path: str, **body: Any) -> None:
        """POST `path` with a JSON body, for calls whose answer is their HTTP status."""
        _DIRECT.open(self._request(path, body), timeout=60).close()

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        return urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )


class Server(Client):
    """A server process in a process group of its own; `with` ends the whole group, however it is left."""

    ready_path = "/health"
    poll_seconds = 0.5

    def __init__(self, command: Sequence[str], *, port: int, environment: Mapping[str, str], log: Path):
        super().__init__(f"http://127.0.0.1:{port}")
        self.command = list(command)
        self.environment = dict(environment)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not started: use it in a `with` block")
        return self._process

    def wait_ready(self, timeout: float, on_wait: Callable[[], None] = lambda: None) -> None:
        """Returns once the server answers; calls `on_wait` every `poll_seconds` or so until then.

        Raises ServerFailed when the process ends first or `timeout` seconds pass.
        """
        deadline = time.monotonic() + timeout
        while not self._answers():
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with exit code {self.process.returncode}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server was not ready after {timeout:.0f} s\n{self.log_tail()}")
            on_wait()
            time.sleep(self.poll_seconds)

    def _answers(self) -> bool:
        try:
            self.get(self.ready_path)
        except OSError:  # refused, timed out, or an HTTP status that is not 200
            return False
        return True

    @contextmanager
    def reported(self, name: str, *more: type[Exception]) -> Iterator[None]:
        """What goes wrong between clients and this server, or is one of `more`, becomes ServerFailed: under the
        server's name, with its own error and the tail of its log."""
        failures: tuple[type[Exception], ...] = (OSError, http.client.HTTPException, ServerFailed, *more)
        try:
            yield
        except failures as error:
            reason = first_error(self.log_text()) or "no error in its log"
            raise ServerFailed(f"{name}: {error}\n{reason}\n{self.log_tail()}") from error

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return f"--- the last lines of {self.log} ---\n" + "\n".join(self.log_text().splitlines()[-lines:])

    def stop(self) -> None:
        """Asks the process group to end and, after ten seconds, ends it."""
        process = self.process
        try:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass
        finally:  # also when a second Ctrl-C arrives while waiting
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def first_error(log: str) -> str:
    """The message that ends the first traceback of a log; empty without one."""
    inside = False
    for line in log.splitlines():
        if "Traceback (most recent call last)" in line:
            inside = True
        elif inside and line[:1].isalpha() and ":" in line:
            return line
    return ""
