"""Options: every step that a batch could have, and what each accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.width.confidence import Confidence
from dflash_sglang.width.kinds import Kind

TABULATE_EVERY = 4  # observed steps


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
        self._ragged = [number for number, kind in enumerate(kinds) if kind.ragged]
        self._listed: dict[int, Options] = {}  # by requests, with shares of 1
        self._of_requests: dict[int, Options] = {}
        self._shares: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of ragged kinds, as `Confidence.shares` says
        self._tabulated = -TABULATE_EVERY

    def of(self, requests: int) -> Options:
        """Of a batch of so many requests. A ragged step verifies a token of each at least, and less than the
        chain of its width."""
        if self._confidence.observed >= self._tabulated + TABULATE_EVERY:
            self._tabulated = self._confidence.observed
            widths = [self._kinds[number].width for number in self._ragged]
            self._shares = dict(zip(self._ragged, self._confidence.shares(widths), strict=True))
            self._of_requests.clear()
        if requests not in self._of_requests:
            self._of_requests[requests] = self._with_shares(requests)
        return self._of_requests[requests]

    def _with_shares(self, n: int) -> Options:
        if n not in self._listed:
            self._listed[n] = self._list(n)
        options, first = self._listed[n], 0
        share, rows = options.share.copy(), options.budget / max(n, 1)
        for kind, end in zip(options.kind[options.last].tolist(), (options.last + 1).tolist(), strict=True):
            if kind in self._shares:
                share[first:end] = np.interp(rows[first:end], *self._shares[kind])
            elif (nodes := self._kinds[kind].nodes) is not None:
                share[first:end] = self._confidence.of_tree(nodes)
            first = end
        return options._replace(share=share)

    def _list(self, n: int) -> Options:
        chain = np.zeros(1, np.int64)
        budgets = [
            self._budgets[(self._budgets >= n) & (self._budgets < n * kind.width)] if kind.ragged else chain
            for kind in self._kinds
        ]
        counts = np.array([len(of_kind) for of_kind in budgets])
        kind = np.repeat(np.arange(len(budgets)), counts)
        widths = np.array([kind.width for kind in self._kinds])
        last = counts.cumsum()[counts > 0] - 1
        return Options(kind, widths[kind], np.concatenate(budgets), last, np.ones(len(kind)))


def least_budget(budgets: Sequence[int], requests: int, width: int) -> int | None:
    """As few tokens as a step of so many requests verifies; None where those are full blocks of this width."""
    tokens = next(budget for budget in budgets if budget >= requests)
    return tokens if tokens < requests * width else None
