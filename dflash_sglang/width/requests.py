"""What is known of each request: what it allows, and how many of its proposals come true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN

# Chosen in the simulation (docs/results/width-simulated.md).
PRIOR_ACCEPTANCE = 0.8  # of a proposal, before anything was drafted
USUAL = 16.0  # requests that this is worth
NEW = 2.0  # steps by which a new request counts as an average one
# Steps of a request after which what was drafted of it weighs 1/e; of the whole batch, for the average.
KEPT = 32.0
WEIGHED = 256  # requests of a batch that are weighed one by one; of more, every second, third, ...


class Work(NamedTuple):
    """Tokens that arrive while one step runs, by request, and what chains accept of each."""

    accepted: np.ndarray  # [n, block] proposals, of a chain of 1, 2, ... rows
    tokens: np.ndarray  # [n]

    def steps_needed(self, widths: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """[m] steps of one request that commit the work: of `shares` [m] times the proposals that a chain of
        `widths` [m] rows accepts."""
        return self.tokens @ (1.0 / (1.0 + self.accepted[:, widths - 1] * shares))


class Requests:
    """A state per slot, which a new request resets (`admit`)."""

    def __init__(self, block: int, slots: int, longest: int | None = None):
        """block: width of the widest blocks. longest: rows of the longest chain, by default a block's. Live
        requests have slots in [0, `slots`)."""
        self.block, self.longest = block, longest or block
        self._usual, self._averaged = PRIOR_ACCEPTANCE ** np.arange(1.0, block), USUAL
        # [slots, positions] mean chance that a proposal is accepted, with all before it
        self._chance = np.tile(self._usual, (slots, 1))
        self._seen = np.zeros(slots)
        self._most = np.full(slots, self.longest, np.int64)
        self._cap = np.full(slots, block, np.int64)
        self._floor = np.full(slots, PLAIN, np.int64)
        self._since = np.zeros(slots, np.int64)
        self._admitted = 0

    def admit(
        self,
        slots: np.ndarray,
        step: int,
        max_widths: Sequence[int] | None = None,
        min_widths: Sequence[int] | None = None,
    ) -> None:
        """New requests take these slots; results of steps before `step` belong to others."""
        self._most[slots] = self.longest if max_widths is None else np.minimum(max_widths, self.longest)
        self._cap[slots] = np.minimum(self._most[slots], self.block)
        self._floor[slots] = PLAIN if min_widths is None else np.minimum(min_widths, self.block)
        self._seen[slots] = 0.0
        self._chance[slots] = self._usual * self._allowed(slots)
        self._since[slots] = self._admitted = step

    def most(self, slots: np.ndarray) -> np.ndarray:
        """[n] tokens that a step may commit of each of these requests: their `max_width`, or the longest
        chain's."""
        return self._most.take(slots)

    def cap(self, slots: np.ndarray) -> int:
        """The largest `max_width` of these requests; 1 without requests."""
        return int(self._cap.take(slots).max(initial=PLAIN))

    def floor(self, slots: np.ndarray) -> int:
        """The largest `min_width` of these requests."""
        return int(self._floor.take(slots).max(initial=PLAIN))

    def _allowed(self, slots: np.ndarray) -> np.ndarray:
        """[n, positions] whether a request may commit a proposal."""
        return np.arange(self.block - 1) < self._cap[slots, None] - 1

    def are_in(self, slots: np.ndarray, step: int) -> np.ndarray:
        """[n] whether the requests that have these slots now are those that step had."""
        return self._since.take(slots) <= step

    def observe(self, slots: np.ndarray, chances: np.ndarray) -> None:
        """chances [n, steps]: of the proposals drafted for these requests, each with all before it.

        Positions beyond those that were drafted keep their chance given the ones before."""
        steps = chances.shape[1]
        if not steps or not len(slots):
            return
        seen = np.minimum(self._seen.take(slots) + 1.0, KEPT)
        self._seen[slots] = seen
        self._chance[slots] = _moved(self._chance[slots], chances, (1.0 / (seen + NEW))[:, None])
        free = self._cap.take(slots) == self.block
        if n := int(free.sum()):
            self._averaged = min(self._averaged + n, KEPT * n)
            self._usual = _moved(self._usual[None], chances[free].sum(axis=0) / n, n / self._averaged)[0]

    def work(self, slots: np.ndarray, width: int, share: float) -> Work:
        """What arrives at a server whose steps have these requests [n], and accept `share` times the proposals
        that a chain of `width` accepts.

        The batch of a held shape holds easy requests less often than they arrive, because they end sooner: by as
        much as a step commits more of them. So every request counts by what is committed of it."""
        some = slots[:: -(-len(slots) // WEIGHED) or 1]
        accepted = np.zeros((len(some), self.block))
        np.cumsum(self._chance[some], axis=1, out=accepted[:, 1:])
        tokens = 1.0 + accepted[:, width - 1] * share
        return Work(accepted, tokens * (len(slots) / max(len(some), 1)))


def _moved(table: np.ndarray, towards: np.ndarray, by: np.ndarray | float) -> np.ndarray:
    """table [n, positions], moved by a part of the way towards [n or none, steps]."""
    out, steps = table.copy(), towards.shape[-1]
    out[:, :steps] += (towards - table[:, :steps]) * by
    if steps < table.shape[1]:
        before = table[:, steps - 1 : steps]
        out[:, steps:] *= out[:, steps - 1 : steps] / np.maximum(before, 1e-9)
    return out
