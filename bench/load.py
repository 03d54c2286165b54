"""A closed loop of requests on one SGLang server: so many at a time, each of the same lengths."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    def prompts(self) -> list[list[int]]:
        """One for each request, every time the same."""
        rng = random.Random(0)
        return [[rng.choice(self.token_ids) for _ in range(self.input_tokens)] for _ in range(self.requests)]


@dataclass(frozen=True)
class Answer:
    """Of one request."""

    seconds: float
    tokens: int
    verify_steps: int  # 0 without speculation


@dataclass(frozen=True)
class Outcome:
    """What a load measured. `step_ms`: time of a request over its verify steps (its tokens without any)."""

    tokens_per_second: float
    accept_length: float
    step_ms: float


def run(server: Server, load: Load) -> Outcome:
    """Drive `server` until every request of `load` is answered."""
    start = time.perf_counter()
    answers = ask(server, load)
    elapsed = time.perf_counter() - start
    tokens = sum(answer.tokens for answer in answers)
    steps = sum(answer.verify_steps for answer in answers)
    return Outcome(
        tokens_per_second=tokens / elapsed,
        accept_length=tokens / steps if steps else 1.0,
        step_ms=1000 * sum(answer.seconds for answer in answers) / (steps or tokens),
    )


def ask(server: Server, load: Load) -> list[Answer]:
    """The answers in the order in which they came. Raises RuntimeError where one is missing."""
    sampling = dict(
        max_new_tokens=load.output_tokens, temperature=load.temperature, top_p=load.top_p, ignore_eos=True
    )
    todo, lock = iter(load.prompts()), threading.Lock()
    answers: list[Answer] = []

    def client() -> None:
        while True:
            with lock:
                prompt = next(todo, None)
            if prompt is None:
                return
            start = time.perf_counter()
            meta = server.generate(input_ids=prompt, sampling_params=sampling)["meta_info"]
            seconds = time.perf_counter() - start
            answers.append(Answer(seconds, meta["completion_tokens"], meta.get("spec_verify_ct", 0)))

    clients = [threading.Thread(target=client) for _ in range(load.concurrency)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    if len(answers) != load.requests:
        raise RuntimeError(f"{load.requests - len(answers)} of {load.requests} requests failed on {server.url}")
    return answers


def take_turns(
    servers: Mapping[str, Server], load: Load, rounds: int, warm_up_tokens: int
) -> dict[str, dict[str, list[float]]]:
    """{server: {figure: [one value per round]}} of a load that the servers have one after the other, each after a
    warm-up of as many requests as run at a time."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in servers}
    for server in servers.values():
        run(server, dataclasses.replace(load, requests=load.concurrency, output_tokens=warm_up_tokens))
    for turn in range(rounds):
        for name in rotated(list(servers), turn):
            outcomes[name].append(run(servers[name], load))
            print(load.concurrency, name, outcomes[name][-1], flush=True)
    return {name: by_figure(of_server) for name, of_server in outcomes.items()}


def by_figure(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """{figure: [one value per round]}"""
    return {
        field.name: [round(getattr(outcome, field.name), 4) for outcome in outcomes]
        for field in dataclasses.fields(Outcome)
    }


def rotated(items: Sequence[str], by: int) -> list[str]:
    """The order of a turn: each begins with the next one."""
    by %= len(items)
    return [*items[by:], *items[:by]]
