"""Ways to lose a rank of a running server, and what then becomes of the server."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import psutil

from dflash_sglang.demo.server import Server

# The server ends at once, not after dumps of stacks and GPU memory (65 s).
NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}


@dataclass(frozen=True)
class End:
    """How a launcher ended: after seconds, with its log, and the titles of the processes that it left running."""

    seconds: float
    log: str
    left: list[str]


def lose(server: Server, title: str, signal: int, request: dict[str, Any], *, patience: float) -> End:
    """Sends the signal to the process whose title contains `title` while `request` runs, and awaits the end.

    Raises subprocess.TimeoutExpired where the launcher still runs after `patience` seconds.
    """
    (victim,) = [process for process in tree(server) if title in _title(process)]
    return end_of(server, victim.pid, signal, request, patience=patience)


def end_of(server: Server, pid: int, signal: int, request: dict[str, Any], *, patience: float) -> End:
    processes = {process: _title(process) for process in tree(server)}
    running = server.stream(**request)
    next(running)
    begin = time.monotonic()
    os.kill(pid, signal)
    server.process.wait(patience)
    seconds = time.monotonic() - begin
    _, alive = psutil.wait_procs(processes, timeout=5)
    left = [processes[process] for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    return End(seconds, server.log_text(), left)


def tree(server: Server) -> list[psutil.Process]:
    """The processes that the launcher started, and those that they started."""
    return psutil.Process(server.process.pid).children(recursive=True)


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
