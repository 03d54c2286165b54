"""Options: every step that a batch could have, and what each accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.width.confidence import Confidence
from dflash_sglang.width.kinds import Kind

TABULATE_EVERY = 4  # observed steps


class Options(NamedTuple):
    """Of the same length, sorted by kind: a chain and a tree are one option, a ragged kind one for each budget."""

    kind: np.ndarray  # an index
    width: np.ndarray
    budget: np.ndarray  # tokens that are verified together; 0: those of the kind
    share: np.ndarray  # proposals that are accepted, over those of a chain of the same width


class AllOptions:
    """The options of batches of every size."""

    def __init__(self, kinds: Sequence[Kind], budgets: Sequence[int], confidence: Confidence):
        """budgets, ascending: how many tokens a ragged step may verify together."""
        self._kinds, self._budgets, self._confidence = list(kinds), np.array(budgets, np.int64), confidence
        self._of_requests: dict[int, Options] = {}
        self._tabulated = 0

    def of(self, requests: int) -> Options:
        """Of a batch of so many requests. A ragged step verifies a token of each at least, and less than the
        chain of its width."""
        if self._confidence.observed >= self._tabulated + TABULATE_EVERY:
            self._tabulated = self._confidence.observed
            self._of_requests.clear()
        if requests not in self._of_requests:
            self._of_requests[requests] = self._made(requests)
        return self._of_requests[requests]

    def _made(self, n: int) -> Options:
        index, budgets, shares = [], [], []
        for number, kind in enumerate(self._kinds):
            of_kind, share = np.zeros(1, np.int64), np.ones(1)
            if kind.ragged:
                of_kind = self._budgets[(self._budgets >= n) & (self._budgets < n * kind.width)]
                share = self._confidence.share(kind.width, of_kind / max(n, 1))
            elif kind.nodes is not None:
                share *= self._confidence.of_tree(kind.nodes)
            index += [number] * len(of_kind)
            budgets.append(of_kind)
            shares.append(share)
        widths = np.array([kind.width for kind in self._kinds])
        return Options(np.array(index), widths[index], np.concatenate(budgets), np.concatenate(shares))


def least_budget(budgets: Sequence[int], requests: int, width: int) -> int | None:
    """As few tokens as a step of so many requests verifies; None where those are full blocks of this width."""
    tokens = next(budget for budget in budgets if budget >= requests)
    return tokens if tokens < requests * width else None
