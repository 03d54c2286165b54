"""Verified tokens shared out among the requests of a step: each has one, the rest are proposals of its own.

What is wanted is what `policy` wants of a width: the least time for the tokens that arrive, whoever they are of.
A request that verifies l tokens and commits a(l) per step costs `(r + l) / a(l)` per committed token, in units of
what one more verified token costs, with r what the request's part of a step costs besides. Whatever the others do,
it is served best at the l where that is least: one proposal more, accepted with chance s together with those
before it, is worth its token where r exceeds `a(l) / s - l`, its price. Prices rise with l. So one number r says
how many tokens each request has, and how many there are for a batch says r.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dflash_sglang.scheduling.width.acceptance import NODES, Acceptance

# Values of r that are tabulated; between them the tokens of a request are interpolated. By the first one nothing
# is worth its token, by the last one everything that is drafted.
RESTS = np.array([-1.0, *np.geomspace(0.25, 400.0, 26), 1e9])
LEAST_CHANCE = 1e-7  # of a proposal, so that its price is below the last of these
FRACTION_BITS = 16
TABULATE_AT_FIRST, TABULATE_EVERY = 16, 4  # tabulations of `Acceptance`: these tables cost several of them


class Shares(NamedTuple):
    """How many tokens a step verifies of each request."""

    lens: np.ndarray  # [n], from 1 to the width

    @property
    def tokens(self) -> int:
        """Of all requests: as many as the step's graph has rows, where it has one.

        Rows beyond those of the requests would be nobody's, and yet SGLang has them attended to, as the last
        request's where no padding is: after its own rows it would read keys and values that were never written,
        NaN among them.
        """
        return int(self.lens.sum())

    @classmethod
    def filling(cls, lens: np.ndarray, width: int, tokens: int) -> Shares | None:
        """Of `tokens` together: `lens` [n], whose sum is at most that, and what is missing, up to the width of
        each request. None where so many are whole blocks."""
        room = width - lens
        missing = tokens - int(lens.sum())
        if missing >= room.sum():
            return None
        return cls(lens + np.clip(missing - (room.cumsum() - room), 0, room))


class Rule(NamedTuple):
    """How requests are served: the draft width (an index), and r (a place between two of `RESTS`)."""

    width: int
    rest: int
    beyond: float


def whole_blocks(width: int) -> Rule:
    """Everything that is drafted is verified."""
    return Rule(width, len(RESTS) - 2, 1.0)


PLAINLY = whole_blocks(0)


class _Table(NamedTuple):
    """[widths, RESTS, NODES] of a request at each r and level."""

    lens: np.ndarray  # verified tokens
    committed: np.ndarray  # tokens of a step
    steps: np.ndarray  # of one committed token
    verified: np.ndarray  # tokens, for one committed token


class Claims:
    """Tokens by level, as `Acceptance` tabulates it, and the requests of a step by their levels.

    Equal on ranks with equal estimates.
    """

    def __init__(self, acceptance: Acceptance):
        self._acceptance = acceptance
        widths = np.array(acceptance.widths)
        self._inside = np.arange(acceptance.block - 1)[:, None, None] < widths[:, None] - 1
        self._shape = len(widths), len(RESTS)
        self._at = np.ogrid[: len(widths), : len(RESTS), :NODES]
        self._tables: dict[int, _Table] = {}
        self._of = 0

    def _table(self, cap: int) -> _Table:
        """Of requests that allow blocks of `cap` tokens."""
        acceptance = self._acceptance
        since = acceptance.tabulated - self._of
        if since and (since >= TABULATE_EVERY or self._of < TABULATE_AT_FIRST):
            self._of = acceptance.tabulated
            self._tables = {}
        if cap not in self._tables:
            if not self._tables:
                self._rank(acceptance.survival)
            lens = np.minimum(self._lens, cap) if cap < acceptance.block else self._lens
            width, _, node = self._at
            committed = self._after[lens - 1, width, node]
            steps = 1.0 / committed
            self._tables[cap] = _Table(lens, committed, steps, lens * steps)
        return self._tables[cap]

    def _rank(self, survival: np.ndarray) -> None:
        """survival [block - 1, widths, NODES] -> how many tokens of a request are worth theirs, by r."""
        positions, widths, nodes = survival.shape
        self._after = np.ones((positions + 1, widths, nodes))
        np.cumsum(survival, axis=0, out=self._after[1:])
        self._after[1:] += 1.0
        prices = self._after[:-1] / np.maximum(survival, LEAST_CHANCE)
        prices -= np.arange(1.0, positions + 1)[:, None, None]
        worth_from = np.searchsorted(RESTS, prices)
        worth_from[~np.broadcast_to(self._inside, prices.shape)] = len(RESTS)
        key = (np.arange(widths)[:, None] * (len(RESTS) + 1) + worth_from) * nodes + np.arange(nodes)
        count = np.bincount(key.ravel(), minlength=widths * (len(RESTS) + 1) * nodes)
        self._lens = 1 + count.reshape(widths, -1, nodes)[:, :-1].cumsum(axis=1)

    def demand(self, slots: np.ndarray, held: Rule) -> tuple[np.ndarray, np.ndarray]:
        """Of every width and r, [widths, RESTS] each: steps of one request that commit what a step by the rule
        `held` commits of these [n], and the tokens of a step of n requests when the batch has become what it then
        stays. Both monotone in r."""
        steps, tokens = np.zeros((2, *self._shape))
        for cap, levels in self._acceptance.levels(slots):
            table = self._table(cap)
            committed = levels * _between(table.committed[held.width], held)
            steps += table.steps @ committed
            tokens += table.verified @ committed
        return steps, len(slots) * tokens / steps

    def rule(self, slots: np.ndarray, width: int, tokens: int) -> Rule:
        """The largest r by which these requests [n] verify at most `tokens` together."""
        total = np.zeros(len(RESTS))
        for cap, levels in self._acceptance.levels(slots):
            total += self._table(cap).lens[width] @ levels
        rest = int(np.searchsorted(total, tokens, side="right")) - 1
        if rest == len(RESTS) - 1:
            return whole_blocks(width)
        return Rule(width, rest, float((tokens - total[rest]) / (total[rest + 1] - total[rest])))

    def lens(self, slots: np.ndarray, rule: Rule) -> np.ndarray:
        """[n] verified tokens of each request, rounded so that their sum is."""
        each = np.empty(len(slots))
        for cap, among in self._acceptance.caps(slots):
            of_level = _between(self._table(cap).lens[rule.width], rule)
            each[among] = self._acceptance.between_nodes(slots[among], of_level)
        # In whole numbers: no rounding of a sum takes a request's only token.
        each *= 1 << FRACTION_BITS
        each += 0.5
        ends = each.astype(np.int64).cumsum()
        ends += 1 << (FRACTION_BITS - 1)
        ends >>= FRACTION_BITS
        lens = ends.copy()
        lens[1:] -= ends[:-1]
        return lens


def _between(values: np.ndarray, rule: Rule) -> np.ndarray:
    """values [RESTS, NODES] -> [NODES] at the rule's r."""
    if not rule.beyond:
        return values[rule.rest]
    return values[rule.rest] + rule.beyond * (values[rule.rest + 1] - values[rule.rest])
