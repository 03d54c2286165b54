"""Options: every step that a batch could have, and what each accepts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN
from dflash_sglang.width.confidence import Confidence

TABULATE_EVERY = 4  # observed steps


class Kind(NamedTuple):
    """Which rows a step may verify, verify budgets aside: a chain of `width` rows for each request; or, `ragged`,
    the likeliest rows of such chains; or a tree of `nodes` for each request, grown over a block of `width`; or a
    chain of `chain` rows, a block and more of its copy."""

    width: int
    ragged: bool = False
    nodes: int | None = None
    chain: int | None = None

    def __str__(self) -> str:
        if self.chain:
            return f"copy {self.chain}"
        return f"tree {self.nodes}" if self.nodes else f"{'ragged ' * self.ragged}{self.width}"


def kinds_of(widths: Sequence[int], ragged: bool, trees: Iterable[int]) -> list[Kind]:
    """All that steps may have: the chains of these widths first, ascending as these are."""
    of_parts = [Kind(width, ragged=True) for width in widths if ragged and width > PLAIN]
    return [*map(Kind, widths), *of_parts, *(Kind(widths[-1], nodes=nodes) for nodes in sorted(trees))]


class Options(NamedTuple):
    """Sorted by kind: a chain and a tree are one option, a ragged kind one for each budget."""

    kind: np.ndarray  # [m] an index
    width: np.ndarray  # [m]
    budget: np.ndarray  # [m] tokens that are verified together; 0: those of the kind
    last: np.ndarray  # [kinds that there are] where the options of each kind end: its last one
    share: np.ndarray  # [m] proposals that are accepted, over those of a chain of the same width


class AllOptions:
    """The options of batches of every size."""

    def __init__(self, kinds: Sequence[Kind], budgets: Sequence[int], confidence: Confidence):
        """budgets, ascending: how many tokens a ragged step may verify together."""
        self._kinds, self._budgets, self._confidence = list(kinds), np.array(budgets, np.int64), confidence
        self._of_requests: dict[int, Options] = {}
        self._shares: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by width, as `Confidence.shares` says
        self._tabulated = -TABULATE_EVERY

    def of(self, requests: int) -> Options:
        """Of a batch of so many requests. A ragged step verifies a token of each at least, and less than the
        chain of its width."""
        if self._confidence.observed >= self._tabulated + TABULATE_EVERY:
            self._tabulated = self._confidence.observed
            ragged = [kind.width for kind in self._kinds if kind.ragged]
            self._shares = dict(zip(ragged, self._confidence.shares(ragged), strict=True))
            self._of_requests.clear()
        if requests not in self._of_requests:
            self._of_requests[requests] = self._list(requests)
        return self._of_requests[requests]

    def _list(self, n: int) -> Options:
        budgets, shares = [], []
        for kind in self._kinds:
            budget, share = np.zeros(1, np.int64), np.ones(1)
            if kind.ragged:
                budget = self._budgets[(self._budgets >= n) & (self._budgets < n * kind.width)]
                share = np.interp(budget / max(n, 1), *self._shares[kind.width])
            elif kind.nodes is not None:
                share[:] = self._confidence.of_tree(kind.nodes)
            budgets.append(budget)
            shares.append(share)
        counts = np.array([len(budget) for budget in budgets])
        kinds = np.repeat(np.arange(len(budgets)), counts)
        widths = np.array([kind.width for kind in self._kinds])[kinds]
        last = counts.cumsum()[counts > 0] - 1
        return Options(kinds, widths, np.concatenate(budgets), last, np.concatenate(shares))


def least_budget(budgets: Sequence[int], requests: int, width: int) -> int | None:
    """As few tokens as a step of so many requests verifies; None where those are full blocks of this width."""
    tokens = next(budget for budget in budgets if budget >= requests)
    return tokens if tokens < requests * width else None
