"""Steps that verify another number of tokens of every request: what they promise, and whose tokens they are."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.scheduling.width.acceptance import Acceptance
from dflash_sglang.scheduling.width.group import Group
from dflash_sglang.scheduling.width.ragged_times import RaggedTimes
from dflash_sglang.scheduling.width.shares import PLAINLY, Claims, Shares, whole_blocks
from dflash_sglang.scheduling.width.step_times import StepTimes

FLATTERED = 1.015  # steps needed beyond the estimate: shares follow what is chance in the requests' estimates, too


class Offers(NamedTuple):
    """The best step of every width."""

    steps_needed: list[float]  # of one request, to commit what a step as they are held commits of all
    seconds: list[float]  # of a step
    whole: float  # steps needed of whole blocks
    tokens: list[int] | None = None  # verified together; None: the width of each request


class RaggedSteps:
    """The step with the least time for the tokens that arrive, at each width, and its shares.

    At start-up: `times.record`, then `start`. It remembers how requests were served last, since that is why the
    batch is what it is.
    """

    def __init__(
        self,
        step_times: StepTimes,
        acceptance: Acceptance,
        totals: Sequence[int],
        max_requests: int,
        group: Group,
    ):
        """totals, ascending: how many tokens a step may verify together. Raises ValueError if they do not reach
        `max_requests` whole blocks, or if the ranks of the group hold requests of their own."""
        if group.gather_loads is not None:
            raise ValueError(
                "totals: expected none where ranks hold requests of their own: every rank verifies the same "
                "number of tokens. Leave them out."
            )
        most = max_requests * acceptance.block
        if not totals or list(totals) != sorted(set(totals)) or totals[-1] < most:
            raise ValueError(
                f"totals={list(totals)}: expected ascending numbers of tokens, the last at least {most}, "
                f"max_requests={max_requests} whole blocks. Add what is missing."
            )
        self.times = RaggedTimes(step_times)
        self._widths = acceptance.widths
        self._totals = list(totals)
        self._claims = Claims(acceptance)
        self._group = group
        self._rule = PLAINLY

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
        uniform: bool,
        interruptions: Callable[[np.ndarray], np.ndarray],
    ) -> Offers:
        """For these requests [n]. seconds [widths]: of steps that verify the width of every request, and `uniform`
        that no others can be had; `interruptions`: seconds [...] that are to be added to those of steps that
        commit so many tokens [...], to compare them. They are not in what is offered."""
        needed, demand = self._claims.demand(slots, self._rule)
        whole = needed[:, -1].tolist()
        if uniform:
            return Offers(whole, seconds, whole[-1])
        first = bisect.bisect_left(self._totals, len(slots))
        last = bisect.bisect_left(self._totals, len(slots) * self._widths[-1])
        totals = self._totals[first : last + 1]
        steps = np.array([np.interp(totals, *of_width) for of_width in zip(demand[1:], needed[1:], strict=True)])
        steps[steps > needed[1:, -1:]] *= FLATTERED
        taken = self.times.seconds(bucket, seconds, totals)[1:]
        added = interruptions(len(slots) * whole[0] / steps)
        best = ((taken + added) * steps).argmin(axis=1).tolist()
        return Offers(
            [whole[0], *(float(of_width[at]) for of_width, at in zip(steps, best, strict=True))],
            [seconds[0], *(float(of_width[at]) for of_width, at in zip(taken, best, strict=True))],
            whole[-1],
            [len(slots), *(totals[at] for at in best)],
        )

    def share_out(self, slots: np.ndarray, width: int, tokens: int | None, probe: bool) -> Shares | None:
        """At `width` (an index), `tokens` together. None where it is the width of each: of whole blocks (no
        `tokens`) and of plain decoding."""
        if tokens is None or width == PLAINLY.width:
            rule = whole_blocks(width)
        else:
            rule = self._claims.rule(slots, width, tokens)
        if not probe:
            self._rule = rule
        if tokens is None or rule == whole_blocks(width):
            return None
        return Shares.filling(self._claims.lens(slots, rule), self._widths[width], tokens)

    def least(self, requests: int, width: int) -> Shares | None:
        """As few tokens of so many requests as a step verifies; None where those are whole blocks of this
        width."""
        tokens = self._totals[bisect.bisect_left(self._totals, requests)]
        return Shares.filling(np.ones(requests, np.int64), width, tokens)
