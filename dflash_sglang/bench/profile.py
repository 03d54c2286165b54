"""Profiles decode steps of a running server under load, through SGLang's /start_profile."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dflash_sglang.bench import trace
from dflash_sglang.bench.settings import PROFILED_TOKENS
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Server, ServerFailed

STEPS = 12
ACTIVITIES = ["GPU"]  # kernels and their launches; recording torch's operations too would slow the host
TIMEOUT = 180.0  # seconds, for the first tokens and for the trace


def take_apart(
    server: Server, name: str, requests: Sequence[Mapping[str, Any]], directory: Path, progress: Progress
) -> dict[str, Any]:
    """The average decode step of so many requests, first rank: `trace.Step`'s fields, idle share, trace file.

    requests: prompts as fields of /generate. directory: of the trace; older ones in it are removed.
    Raises ServerFailed or OSError where a request is not answered, TraceError for a trace that has no steps.
    """
    progress.begin(f"profiling {STEPS} steps, {len(requests)} at a time: {name}")
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.trace.json.gz"):
        old.unlink()
    sampling = {"temperature": 0, "max_new_tokens": PROFILED_TOKENS, "ignore_eos": True}
    decoding = threading.Semaphore(0)

    def client(request: Mapping[str, Any]) -> None:
        for number, _ in enumerate(server.stream(**request, sampling_params=sampling)):
            if number == 0:
                decoding.release()

    pool = ThreadPoolExecutor(len(requests))
    try:
        clients = [pool.submit(client, request) for request in requests]
        deadline = time.monotonic() + TIMEOUT
        for _ in clients:
            while not decoding.acquire(timeout=1):
                for failed in (one for one in clients if one.done()):
                    failed.result()
                if time.monotonic() > deadline:
                    raise ServerFailed(f"no token within {TIMEOUT:.0f} s of a request")
        server.post(
            "/start_profile", output_dir=str(directory), num_steps=STEPS, activities=ACTIVITIES,
            with_stack=False, record_shapes=False,
        )  # fmt: skip
        for early in (one for one in clients if one.done()):
            early.result()
            raise ServerFailed(f"a request of {PROFILED_TOKENS} tokens ended before its profile began")
        for done in clients:
            done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # of a run that broke off, they end with their server
    path, step = wait_for_trace(directory, progress)
    progress.end(f"{step.step_ms:.3f} ms a step")
    return {"concurrency": len(requests), **dataclasses.asdict(step), "idle": step.idle, "trace": str(path)}


def wait_for_trace(directory: Path, progress: Progress, timeout: float = TIMEOUT) -> tuple[Path, trace.Step]:
    """The first rank's trace once it is written to its end. Raises TraceError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        for path in sorted(directory.glob("*TP-0*.trace.json.gz")):
            try:
                return path, trace.read(path)
            except (EOFError, OSError, json.JSONDecodeError):  # still being written
                pass
        if time.monotonic() > deadline:
            raise trace.TraceError(f"no complete trace in {directory} after {timeout:.0f} s")
        progress.update("waiting for the trace")
        time.sleep(0.5)
