"""Requests on one SGLang server, so many at a time, each of the same lengths: a closed loop, or in waves."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from dflash_sglang.bench.load import rotated
from dflash_sglang.demo.server import Server


@dataclass(frozen=True)
class Load:
    """Random token ids in, a fixed number of tokens out. Random ids say nothing about acceptance.

    ``custom_params``: of every request's sampling parameters; ``fields``: more fields of every request."""

    concurrency: int
    requests: int
    input_tokens: int = 256
    output_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    token_ids: range = range(1000, 100_000)
    waves: bool = False  # the next requests come when all have ended, not one for each that has
    pause: float = 0.0  # seconds before each wave
    custom_params: Mapping[str, Any] | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def prompts(self) -> list[list[int]]:
        """One for each request, every time the same."""
        rng = random.Random(0)
        return [self.prompt(rng) for _ in range(self.requests)]

    def prompt(self, rng: random.Random) -> list[int]:
        return [rng.choice(self.token_ids) for _ in range(self.input_tokens)]

    def sampling(self, output_tokens: int, event_tokens: int) -> dict[str, Any]:
        """Sampling parameters of an answer of so many tokens, told at the first and then after each so many."""
        return dict(
            max_new_tokens=output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            presence_penalty=self.presence_penalty,
            ignore_eos=True,
            stream_interval=event_tokens,
            custom_params=self.custom_params,
        )


@dataclass(frozen=True)
class OfTexts(Load):
    """Prompts of texts, any of them; `input_tokens` and `token_ids` do not count."""

    texts: Sequence[Sequence[int]] = ()

    def prompt(self, rng: random.Random) -> list[int]:
        return list(rng.choice(self.texts))


@dataclass(frozen=True)
class Answer:
    """Of one request. Times are those of `time.perf_counter`."""

    asked: float
    first: float  # token
    last: float
    tokens: int
    verify_steps: int  # 0 without speculation

    @property
    def seconds(self) -> float:
        return self.last - self.asked


@dataclass(frozen=True)
class Outcome:
    """What a load measured. `step_ms`: time of a request after its first token, in waves after the last first
    token of its wave, over its verify steps (its tokens without any). So in waves no prefill is part of it."""

    tokens_per_second: float
    accept_length: float
    step_ms: float


def run(server: Server, load: Load) -> Outcome:
    """Drive `server`, whose prefix cache is emptied before, until every request of `load` is answered."""
    server.post("/flush_cache?timeout=60")
    start = time.perf_counter()
    waves = _waves(server, load)
    elapsed = time.perf_counter() - start
    answers = [answer for wave in waves for answer in wave]
    tokens = sum(answer.tokens for answer in answers)
    steps = sum(answer.verify_steps for answer in answers)
    return Outcome(
        tokens_per_second=tokens / elapsed,
        accept_length=tokens / steps if steps else 1.0,
        step_ms=1000 * sum(decode_seconds(wave, load.waves) for wave in waves) / (steps or tokens - len(answers)),
    )


def decode_seconds(answers: Sequence[Answer], wave: bool) -> float:
    """Of all requests, from the first token on; of a wave from when all have theirs on."""
    latest = max(answer.first for answer in answers)
    return sum(answer.last - (latest if wave else answer.first) for answer in answers)


def ask(server: Server, load: Load) -> list[Answer]:
    """The answers in the order in which they came. Raises RuntimeError where one is missing."""
    return [answer for wave in _waves(server, load) for answer in wave]


def _waves(server: Server, load: Load) -> list[list[Answer]]:
    prompts, answers = load.prompts(), []
    size = load.concurrency if load.waves else len(prompts)
    for first in range(0, len(prompts), size):
        time.sleep(load.pause)
        answers.append(_ask(server, load, prompts[first : first + size]))
    return answers


def _ask(server: Server, load: Load, prompts: Sequence[list[int]]) -> list[Answer]:
    sampling = load.sampling(load.output_tokens, event_tokens=load.output_tokens)  # the first token and the rest
    todo, lock = iter(prompts), threading.Lock()
    answers: list[Answer] = []

    def client() -> None:
        while True:
            with lock:
                prompt = next(todo, None)
            if prompt is None:
                return
            asked = time.perf_counter()
            events = server.stream(input_ids=prompt, sampling_params=sampling, **load.fields)
            seen = [(time.perf_counter(), event["meta_info"]) for event in events]
            if len(seen) < 2:  # SGLang joins what its HTTP process had no time to send
                raise RuntimeError(
                    "an answer came in one piece: expected its first token before the rest; other work keeps the "
                    "processors busy, measure without it"
                )
            (first, _), *_, (last, meta) = seen
            answers.append(Answer(asked, first, last, meta["completion_tokens"], meta.get("spec_verify_ct", 0)))

    with ThreadPoolExecutor(load.concurrency) as pool:
        clients = [pool.submit(client) for _ in range(load.concurrency)]
    failed = [error for one in clients if (error := one.exception())]
    if failed:
        missing = f"{len(prompts) - len(answers)} of {len(prompts)} requests failed on {server.url}"
        raise RuntimeError(f"{missing}: {failed[0]}") from failed[0]
    return answers


def take_turns(servers: Mapping[str, Server], load: Load, rounds: int) -> dict[str, dict[str, list[float]]]:
    """{server: {figure: [one value per round]}} of a load that the servers have one after the other.

    Every round has another order. As many requests as run at a time warm up: whole ones, which a width policy
    learns from."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in servers}
    for server in servers.values():
        run(server, dataclasses.replace(load, requests=load.concurrency))
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
