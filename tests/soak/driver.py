"""Sends the requests of a soak and keeps what came back; reads what a server holds."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.soak.requests import Request

TIMEOUT = 300.0  # seconds, of any one request
ABORTED_BEFORE_ITS_GRAMMAR = "Aborted by AbortReq."  # a 400 for a request whose grammar is compiled still


@dataclass
class Outcome:
    """What came back of a request. `answers`: the final one of every sample."""

    request: Request
    status: int | None = None  # None where the client went away first
    answers: list[dict[str, Any]] = field(default_factory=list)
    partial: list[list[int]] = field(default_factory=list)  # output ids of each event of a stream
    error: str = ""

    @property
    def aborted(self) -> bool:
        """Whether the abort reached the request before its end."""
        if self.request.abort is None:
            return False
        if ABORTED_BEFORE_ITS_GRAMMAR in self.error:
            return True
        return (self.status is None and not self.error) or any(
            finish_of(answer)["type"] == "abort" for answer in self.answers
        )


def finish_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    return answer["meta_info"]["finish_reason"] or {"type": None}


def call(url: str, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """(status, body) of one HTTP call; `body`: JSON, encoded where it is bytes."""
    connection = _connect(url)
    data = body if isinstance(body, bytes) else json.dumps(body)
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def drive(url: str, asked: Sequence[Request], concurrency: int, timeout: float = TIMEOUT) -> list[Outcome]:
    """Sends all requests, `concurrency` at a time, and returns their outcomes in order."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda request: ask(url, request, timeout), asked))


def _connect(url: str, timeout: float = TIMEOUT) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)


def ask(url: str, request: Request, timeout: float = TIMEOUT) -> Outcome:
    outcome = Outcome(request)
    leaves = request.abort == "disconnect"
    deadline = time.monotonic() + (request.delay if leaves else timeout)
    aborter = threading.Timer(request.delay, _abort, (url, request.body["rid"]))
    if request.abort == "abort_request":
        aborter.start()
    connection = _connect(url)
    try:
        connection.request("POST", "/generate", json.dumps(request.body), {"Content-Type": "application/json"})
        connection.sock.settimeout(max(1e-3, deadline - time.monotonic()))
        answer = connection.getresponse()
        with answer:
            if request.body["stream"] and answer.status == 200:
                _read_stream(answer, outcome, deadline)
            else:
                content = answer.read()
                if answer.status == 200:
                    parsed = json.loads(content)
                    outcome.answers = parsed if isinstance(parsed, list) else [parsed]
                else:
                    outcome.error = content.decode(errors="replace")
        outcome.status = answer.status
    except TimeoutError:
        outcome.error = "" if leaves else f"no answer within {timeout:.0f} s"
    except (OSError, http.client.HTTPException, ValueError) as error:  # the server went away
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        if aborter.is_alive():
            aborter.join()
    return outcome


def _abort(url: str, rid: str) -> None:
    with suppress(OSError, http.client.HTTPException):  # a server that is gone shows in the request's own outcome
        call(url, "POST", "/abort_request", {"rid": rid})


def _read_stream(answer: http.client.HTTPResponse, outcome: Outcome, deadline: float) -> None:
    """Fills `answers` and `partial`. Raises TimeoutError at the deadline, ValueError where SGLang reports one."""
    last: dict[int, dict[str, Any]] = {}
    ended = False
    for line in answer:
        if line.strip() == b"data: [DONE]":
            ended = True
        elif line.startswith(b"data:"):
            event = json.loads(line[len(b"data:") :])
            if "error" in event:
                raise ValueError(event["error"])
            last[event.get("index", 0)] = event
            if outcome.request.samples == 1:
                outcome.partial.append(event["output_ids"])
        if time.monotonic() > deadline:
            raise TimeoutError
    if not ended:
        raise ValueError("the stream ended without [DONE]")
    outcome.answers = [last[index] for index in sorted(last)]


def held_tokens(url: str) -> int:
    """Token slots of an idle server that are neither free nor a cached prefix that may be evicted.

    Every idle moment runs SGLang's own check of the pools, which ends the server where one leaks. It takes the
    word of locked prefixes that something uses them; this figure does not.
    """
    _wait_idle(url)
    time.sleep(1.0)  # several idle moments
    return sum(load["num_used_tokens"] for load in _wait_idle(url))


def _wait_idle(url: str, timeout: float = 60.0) -> list[dict[str, Any]]:
    """The loads of a server, one per data-parallel rank, once it runs nothing. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while True:
        loads = json.loads(call(url, "GET", "/v1/loads")[1])["loads"]
        if not any(
            load["num_running_reqs"] + load["num_waiting_reqs"] + load["queues"]["grammar"] for load in loads
        ):
            return loads
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server still runs requests after {timeout:.0f} s: {loads}")
        time.sleep(0.1)
