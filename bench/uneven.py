"""Uneven load for parallel servers: one rank alone, bursts, one request at a time, aborts, mixtures."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.soak.requests import Corpus, Request, requests

PHASES = 6  # of a round


@dataclass(frozen=True)
class Phase:
    """A stretch of load: so many requests, so many at a time.

    rank: that alone gets them, None: whichever the server picks. all_aborted: none is left to its end.
    """

    name: str
    count: int
    concurrency: int
    rank: int | None = None
    all_aborted: bool = False

    def requests(self, seed: int, corpus: Corpus) -> list[Request]:
        asked = requests(self.count, seed, corpus)
        if self.all_aborted:
            asked = [aborted(request, i) for i, request in enumerate(asked)]
        return asked if self.rank is None else [routed(request, self.rank) for request in asked]


def phases(replicas: int) -> Iterator[Phase]:
    """Without end; each round singles out the next rank where there are several."""
    for turn in itertools.count():
        rank = turn % replicas if replicas > 1 else None
        yield Phase("some to one rank", 48, 8, rank)
        yield Phase("burst", 96, 96)
        yield Phase("one at a time", 12, 1, rank)
        yield Phase("aborted", 48, 24, all_aborted=True)
        yield Phase("burst to one rank", 64, 64, rank)
        yield Phase("mixed", 96, 24)


def routed(request: Request, rank: int) -> Request:
    """The same request for one data-parallel rank."""
    return dataclasses.replace(request, body={**request.body, "routed_dp_rank": rank})


def aborted(request: Request, i: int) -> Request:
    """The same request, aborted after 0 to 0.1 seconds where it was not to be."""
    if request.abort is not None:
        return request
    way = "disconnect" if request.samples > 1 or i % 2 else "abort_request"
    return dataclasses.replace(request, abort=way, delay=0.01 * (i % 11))


def compared(count: int, seed: int, corpus: Corpus, replicas: int) -> list[Request]:
    """`count` greedy requests that nothing aborts, spread over the ranks in turn."""
    drawn: list[Request] = [one for one in requests(4 * count, seed, corpus) if one.greedy][:count]
    kept = [Request(one.body) for one in drawn]
    return [routed(one, i % replicas) for i, one in enumerate(kept)] if replicas > 1 else kept


def astray(body: Any, answers: list[dict[str, Any]]) -> list[int]:
    """The ranks that answered a routed request and were not asked to."""
    asked = body.get("routed_dp_rank")
    ranks = [answer["meta_info"].get("dp_rank") for answer in answers]
    return [] if asked is None else [rank for rank in ranks if rank != asked]
