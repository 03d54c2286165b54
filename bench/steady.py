"""Requests on one SGLang server that come and go, always so many at a time, looked at for some seconds.

A closed loop whose answers differ in length, so that their ends are spread over the steps as those of real traffic
are, whether or not the server commits the same number of tokens of all requests. The first ones are somewhere in
their middle. What is measured has neither a beginning nor an end of the load in it.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from bench.load import Load, Outcome, by_figure
from dflash_sglang.bench.load import rotated
from dflash_sglang.demo.server import Server

SPREAD = 0.5  # of the mean output length, to both sides
EVENT_TOKENS = 32  # of an answer, from one look at it to the next
RAMP = 0.7  # seconds between the last client's first token and the first look
WARM_UP = 1.5  # seconds that are not measured
CONTENDER = 0.93  # of the tokens per second of the best that is not kept anyway, in the first round
JOIN_SECONDS = 60.0


class Look(NamedTuple):
    """What a client saw of an answer.

    ``at``: of `time.perf_counter`; ``tokens``: that came since its last look; ``whole``: tokens and verify steps
    of the answer where it has ended, which SGLang tells no sooner.
    """

    at: float
    tokens: int
    whole: tuple[int, int] | None = None


class Client:
    """Asks one request after the other until it is told to end."""

    def __init__(self, server: Server, load: Load, number: int, ended: threading.Event) -> None:
        self._server, self._load, self._ended = server, load, ended
        self._random = random.Random(number)
        self.looks: list[Look] = []
        self.started = threading.Event()
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            for length in self._lengths():
                if self._ended.is_set():
                    return
                self._answer(length)
        except (OSError, RuntimeError, ValueError) as error:
            self.failed = error
        finally:
            self.started.set()

    def _lengths(self) -> Iterator[int]:
        """Output tokens. Of the first request what is left; long ones are found more often than short ones."""
        mean, draw = self._load.output_tokens, self._random.random
        whole = mean * ((1 - SPREAD) ** 2 + 4 * SPREAD * draw()) ** 0.5
        yield max(1, round(whole * draw()))
        while True:
            yield round(mean * (1 + SPREAD * (2 * draw() - 1)))

    def _answer(self, length: int) -> None:
        prompt = self._load.prompt(self._random)
        sampling = self._load.sampling(length, EVENT_TOKENS)
        so_far = 0
        for event in self._server.stream(input_ids=prompt, sampling_params=sampling):
            meta = event["meta_info"]
            tokens, ended = meta["completion_tokens"], meta["finish_reason"] is not None
            whole = (tokens, meta.get("spec_verify_ct", 0)) if ended else None
            self.looks.append(Look(time.perf_counter(), tokens - so_far, whole))
            so_far = tokens
            self.started.set()


def watch(server: Server, load: Load, seconds: float) -> Outcome:
    """Tokens and steps of `seconds`, of `load.concurrency` clients; `load.requests` and `waves` do not count.

    Raises RuntimeError where a client failed, or no answer ended in this time."""
    looks, start = occupy(server, load, seconds)
    return outcome(looks, load.concurrency, start, start + seconds)


def occupy(server: Server, load: Load, seconds: float) -> tuple[list[Look], float]:
    """What the clients saw, and when so many seconds began with all of them there. Raises RuntimeError where one
    failed."""
    server.post("/flush_cache?timeout=60")
    with clients(server, load) as asking:
        time.sleep(RAMP)
        start = time.perf_counter()
        time.sleep(seconds)
    return [look for client in asking for look in client.looks], start


@contextlib.contextmanager
def clients(server: Server, load: Load) -> Iterator[list[Client]]:
    """`load.concurrency` of them; `with` begins when each has its first token. Its end aborts whatever the server
    does: clients of others go on with their next requests. Raises RuntimeError where one failed."""
    ended = threading.Event()
    asking = [Client(server, load, number, ended) for number in range(load.concurrency)]
    for client in asking:
        client.thread.start()
    try:
        for client in asking:
            client.started.wait()
        yield asking
    finally:
        ended.set()
        server.post("/abort_request", rid="", abort_all=True)
        for client in asking:
            client.thread.join(JOIN_SECONDS)
    failed = [client.failed for client in asking if client.failed is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(asking)} clients failed on {server.url}: {failed[0]!r}")


def outcome(looks: Collection[Look], concurrency: int, start: float, end: float) -> Outcome:
    """Of the looks from `start` to `end`; the accept length of all answers that have ended by then. Raises
    RuntimeError without any."""
    ended = [look.whole for look in looks if look.whole is not None and look.at <= end]
    if not ended:
        raise RuntimeError(f"no answer ended in {end - start:.1f} s: expected one or more. Look longer.")
    tokens, steps = (sum(column) for column in zip(*ended, strict=True))
    length = tokens / steps if steps else 1.0
    rate = sum(look.tokens for look in looks if start < look.at <= end) / (end - start)
    return Outcome(tokens_per_second=rate, accept_length=length, step_ms=1000 * concurrency * length / rate)


def take_turns(
    servers: Mapping[str, Server],
    loads: Mapping[str, Load],
    rounds: int,
    measured: Callable[[str, Server, Load], Outcome],
    settled: Collection[str] = (),
    kept: Collection[str] = (),
) -> dict[str, dict[str, list[float]]]:
    """{name: {figure: [one value per round]}} of loads that servers have one after the other, as they are
    `measured`; a server may have several names.

    Every round has another order. Those that are `kept` have all rounds. Of the others those that are far from
    their best in the first round have no other. So this best has as many rounds as what it is compared with. Each
    server is warmed up; those that are `settled`, by their own load, before each of their rounds.
    """
    outcomes: dict[str, list[Outcome]] = {name: [] for name in servers}
    for server, name in {server: name for name, server in servers.items()}.items():
        occupy(server, loads[name], WARM_UP)
    names = list(servers)
    for turn in range(rounds):
        for name in rotated(names, turn):
            if name in settled:
                occupy(servers[name], loads[name], WARM_UP)
            outcomes[name].append(measured(name, servers[name], loads[name]))
            print(loads[name].concurrency, name, outcomes[name][-1], flush=True)
        if not turn:
            names = contenders({name: of[0].tokens_per_second for name, of in outcomes.items()}, kept)
    return {name: by_figure(of_server) for name, of_server in outcomes.items()}


def contenders(rates: Mapping[str, float], kept: Collection[str]) -> list[str]:
    """The names of `take_turns` that have another round. rates: of the first one."""
    best = max((rate for name, rate in rates.items() if name not in kept), default=0.0)
    return [name for name, rate in rates.items() if name in kept or rate >= CONTENDER * best]
