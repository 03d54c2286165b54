"""A closed loop of requests on one SGLang server: so many at a time, each of the same lengths."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from dflash_sglang.demo.server import Server


@dataclass(frozen=True)
class Load:
    """Random token ids in, a fixed number of tokens out. Random ids say nothing about acceptance."""

    concurrency: int
    requests: int
    input_tokens: int = 256
    output_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    token_ids: range = range(1000, 100_000)


@dataclass(frozen=True)
class Outcome:
    """What a load measured. `step_ms`: time of a request over its verify steps (its tokens without any)."""

    tokens_per_second: float
    accept_length: float
    step_ms: float


def run(server: Server, load: Load) -> Outcome:
    """Drive `server` until every request of `load` is answered."""
    rng = random.Random(0)
    prompts = [[rng.choice(load.token_ids) for _ in range(load.input_tokens)] for _ in range(load.requests)]
    sampling = dict(
        max_new_tokens=load.output_tokens, temperature=load.temperature, top_p=load.top_p, ignore_eos=True
    )
    todo, lock = iter(prompts), threading.Lock()
    answers: list[tuple[float, dict[str, Any]]] = []

    def client() -> None:
        while True:
            with lock:
                prompt = next(todo, None)
            if prompt is None:
                return
            start = time.perf_counter()
            meta = server.generate(input_ids=prompt, sampling_params=sampling)["meta_info"]
            answers.append((time.perf_counter() - start, meta))

    start = time.perf_counter()
    clients = [threading.Thread(target=client) for _ in range(load.concurrency)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    elapsed = time.perf_counter() - start
    if len(answers) != load.requests:
        raise RuntimeError(f"{load.requests - len(answers)} of {load.requests} requests failed on {server.url}")
    tokens = sum(meta["completion_tokens"] for _, meta in answers)
    steps = sum(meta.get("spec_verify_ct", 0) for _, meta in answers)
    return Outcome(
        tokens_per_second=tokens / elapsed,
        accept_length=tokens / steps if steps else 1.0,
        step_ms=1000 * sum(latency for latency, _ in answers) / (steps or tokens),
    )
