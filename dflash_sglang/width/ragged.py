"""Steps that verify another number of tokens of every request: how many together, and what they promise."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.width.acceptance import Acceptance
from dflash_sglang.width.confidence import Confidence
from dflash_sglang.width.group import Group
from dflash_sglang.width.ragged_times import RaggedTimes
from dflash_sglang.width.step_times import StepTimes

TABULATE_EVERY = 4  # observed steps


class Share(NamedTuple):
    """Of the rows of whole blocks, those that a step verifies."""

    tokens: int | None  # verified together; None: the width of each request
    part: float  # of the proposals that come true, those that are verified


class Offers(NamedTuple):
    """The best step of every width."""

    steps_needed: list[float]  # of one request, to commit what a step as they are held commits of all
    seconds: list[float]  # of a step
    whole: float  # steps needed of whole blocks
    shares: list[Share] | None = None


class RaggedSteps:
    """The step with the least time for the tokens that arrive, at each width. Whose tokens it verifies the draft's
    probabilities say (`kernels.block.share_rows`).

    How many proposals of whole blocks come true is what `Acceptance` knows of each request; which part of them is
    among so many rows, what `Confidence` knows of the batch. It remembers how requests were served last, since
    that is why the batch is what it is.

    At start-up: `times.record`, then `start`.
    """

    def __init__(
        self,
        step_times: StepTimes,
        acceptance: Acceptance,
        budgets: Sequence[int],
        max_requests: int,
        group: Group,
        prior_acceptance: float,
    ):
        """budgets, ascending: how many tokens a step may verify together; prior_acceptance: of a proposal, before
        anything is known. Raises ValueError if they do not reach `max_requests` whole blocks, or if the ranks of
        the group hold requests of their own."""
        if group.gather_loads is not None:
            raise ValueError(
                "budgets: expected none where ranks hold requests of their own: every rank verifies the same "
                "number of tokens. Leave them out."
            )
        most = max_requests * acceptance.block
        if not budgets or list(budgets) != sorted(set(budgets)) or budgets[-1] < most:
            raise ValueError(
                f"budgets={list(budgets)}: expected ascending numbers of tokens, the last at least {most}, "
                f"max_requests={max_requests} whole blocks. Add what is missing."
            )
        self.times = RaggedTimes(step_times)
        self.confidence = Confidence(acceptance.widths, prior_acceptance)
        self._acceptance = acceptance
        self._widths = acceptance.widths
        self._budgets = list(budgets)
        self._group = group
        self._held = 0, 1.0
        self._of_requests: dict[int, tuple[list[int], list[np.ndarray]]] = {}
        self._tabulated = 0

    def start(self) -> None:
        """Builds the table of what was recorded, rank 0's for every rank."""
        self.times.fit()
        if self._group.share_times is not None:
            self.times.load(self._group.share_times(self.times.table()))

    def offers(
        self,
        slots: np.ndarray,
        bucket: int,
        seconds: list[float],
        needs_full_blocks: bool,
        interruptions: Callable[[np.ndarray], np.ndarray],
    ) -> Offers:
        """For these requests [n]. seconds [widths]: of steps that verify the width of every request, and
        `needs_full_blocks` that no others can be had; `interruptions`: seconds [...] that are to be added to those
        of steps that commit so many tokens [...], to compare them. They are not in what is offered."""
        n, levels = len(slots), self._levels(slots)
        needed = [_steps(levels, index, np.ones(1))[0] for index in range(len(self._widths))]
        whole, taken, shares = needed[-1], list(seconds), [Share(None, 1.0)] * len(needed)
        if not needs_full_blocks:
            budgets, choices = self._choices(n)
            table = self.times.seconds(bucket, seconds, budgets)
            for index, verified in enumerate(choices, 1):
                fewer = len(verified) - 1
                steps = _steps(levels, index, verified)
                step = np.append(table[index, :fewer], seconds[index])
                best = int(((step + interruptions(n * needed[0] / steps)) * steps).argmin())
                needed[index], taken[index] = float(steps[best]), float(step[best])
                shares[index] = Share(budgets[best] if best < fewer else None, verified[best])
        return Offers(needed, taken, whole, shares)

    def _choices(self, n: int) -> tuple[list[int], list[np.ndarray]]:
        """Of n requests: the budgets that are less than whole blocks of the widest, and for each width but the
        first the parts of what comes true among those that are less than its own, and among these."""
        if self.confidence.observed >= self._tabulated + TABULATE_EVERY:
            self._tabulated = self.confidence.observed
            self._of_requests.clear()
        if n not in self._of_requests:
            budgets = [total for total in self._budgets if n <= total < n * self._widths[-1]]
            rows = [[*budgets[: bisect.bisect_left(budgets, n * w)], n * w] for w in self._widths[1:]]
            parts = [self.confidence.part(index, np.array(of) / n) for index, of in enumerate(rows, 1)]
            self._of_requests[n] = budgets, parts
        return self._of_requests[n]

    def hold(self, width: int, part: float) -> None:
        """How requests are served from now on: at `width` (an index), with this part of what comes true."""
        self._held = width, part

    def _levels(self, slots: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of requests [n] by the widest blocks that they allow: what a step commits, [widths, nodes], and what
        steps as they are held commit of those at each node together [nodes]."""
        width, part = self._held
        found = []
        for cap, requests in self._acceptance.levels(slots):
            committed = self._acceptance.committed(cap)
            found.append((committed, requests * (1.0 + (committed[width] - 1.0) * part)))
        return found

    def least(self, requests: int, width: int) -> int | None:
        """As few tokens as a step of so many requests verifies; None where those are whole blocks of this
        width."""
        tokens = self._budgets[bisect.bisect_left(self._budgets, requests)]
        return tokens if tokens < requests * width else None


def _steps(levels: list[tuple[np.ndarray, np.ndarray]], width: int, parts: np.ndarray) -> np.ndarray:
    """Steps of one request that commit what steps as they are held commit, at `width` (an index) with these parts
    [n] of what comes true verified: [n]."""
    return sum((1.0 / (1.0 + (committed[width] - 1.0) * parts[:, None])) @ held for committed, held in levels)
