"""WidthPolicy: what the worker asks for the width of the next step, and tells of those that came back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.width.acceptance import Acceptance
from dflash_sglang.width.decider import Decider, Decision, Load, Plan
from dflash_sglang.width.group import Group
from dflash_sglang.width.metrics import WidthMetrics

logger = logging.getLogger(__name__)


class Step(NamedTuple):
    """A step that was chosen, for when its result is there."""

    number: int
    slots: np.ndarray  # [n] of its requests
    decision: Decision
    plan: Plan | None


class WidthPolicy:
    """One width for every step of the whole batch.

    Serving: `prefill` for every prefill of any rank, `admit` when a request is prefilled, `choose` before each
    decode step, `verified` when its result is on the host. Overlap scheduling chooses a step or two ahead of what
    it was told. A result that comes back after its request's slot was given away is dropped.

    All ranks of a group make the same calls of `choose` in the same order. Rank 0 decides (`decider`), the others
    are told. Every rank estimates the acceptance of its own requests. Nothing here reads a clock or draws.

    Results decide nothing but estimates. One that is lost or fits no step is left out of them (`leave_out`).
    """

    def __init__(
        self,
        config: WidthConfig,
        block: int,
        buckets: Sequence[int],
        slots: int,
        group: Group | None = None,
        budgets: Sequence[int] | None = None,
    ):
        """`block`: the widest block that is served. `buckets`, ascending: the batch sizes that steps are padded
        to, the last one for all requests that can run. Requests are named by slots in [0, `slots`).

        `budgets`, ascending: how many tokens a ragged step may verify together, the last one enough for full
        blocks of all requests; without, steps are not ragged."""
        self.widths = config.states(block)
        self.buckets, self.budgets = list(buckets), budgets
        self.acceptance = Acceptance(self.widths, slots)
        self.metrics = WidthMetrics(self.widths)
        self._group = group or Group()
        self._fixed = Decision(self.widths[0]) if config.fixed is not None else None
        self.decider: Decider | None = None
        if self._fixed is None and self._group.decides:
            self.decider = Decider(self.acceptance, buckets, budgets)
        # A rank whose requests are rank 0's has nothing to say, so it learns nothing of them.
        self._has_a_say = self.decider is not None or (self._fixed is None and self._group.gather is not None)
        self._held = 0, 1.0  # index of the width of the latest step that was no probe, and its share
        self._steps = 0

    def admit(
        self, slots: np.ndarray, max_widths: Sequence[int] | None = None, min_widths: Sequence[int] | None = None
    ) -> None:
        """New requests in these slots [n], with the `max_width` and the `min_width` of each."""
        self.acceptance.admit(slots, self._steps, max_widths, min_widths)

    def prefill(self) -> None:
        """The next decode step comes after a prefill, of this rank's requests or of another's."""
        if self.decider is not None:
            self.decider.interruptions.prefill()

    def choose(self, slots: np.ndarray, context_tokens: int, needs_full_blocks: bool = False) -> Step:
        """The width of the next step for the requests in `slots` [n], whose contexts have `context_tokens`
        together.

        No slots: another rank has requests. `needs_full_blocks`: the step verifies the width of every request."""
        slots = np.array(slots, np.intp)
        if self._fixed is not None:
            decision, plan = self._fixed, None
        else:
            decision, plan = self._decide(slots, context_tokens, needs_full_blocks)
        self.metrics.chose(decision, len(slots))
        self._steps += 1
        return Step(self._steps - 1, slots, decision, plan)

    def _decide(self, slots: np.ndarray, context: int, needs_full_blocks: bool) -> tuple[Decision, Plan | None]:
        """This rank's decision, or what the deciding rank tells; with the plan, on that rank."""
        group, decision, plan = self._group, Decision(self.widths[-1]), None
        if self._has_a_say:
            work = self.acceptance.work(slots, *self._held)
            load = Load.from_requests(self.acceptance, slots, context, work)
            if group.gather is not None:
                load = Load.from_rows(group.gather(load.row()))
            if self.decider is not None:
                decision, plan = self.decider.decide(load, work, needs_full_blocks)
        if group.broadcast is not None:
            decision = Decision.from_row(group.broadcast(decision.row()))
        if not decision.probe:
            self._held = self.widths.index(decision.width), decision.share
        return decision, plan

    def verified(
        self,
        step: Step,
        accepted: Sequence[int] | np.ndarray,
        seconds: float | None = None,
        logprobs: np.ndarray | None = None,
        lens: np.ndarray | None = None,
    ) -> None:
        """A step came back: `accepted` [n] proposals, and how long it took.

        logprobs [n, steps]: of what was drafted, where the draft gives them. lens [n]: verified tokens of each
        request; None: full blocks. `seconds`: from the end of the step before to the end of this one, so that the
        host's share counts; None where something else ran in between (a prefill).
        """
        if len(accepted) != len(step.slots):
            self.leave_out(f"{len(accepted)} results for step {step.number} of {len(step.slots)} requests")
            return
        self.metrics.came_back(step.decision, seconds)
        if not self._has_a_say:
            return
        accepted, width = np.asarray(accepted, np.int64), self.widths.index(step.decision.width)
        self.acceptance.observe(step.number, step.slots, width, accepted, lens)
        if self.decider is not None and self.decider.ragged is not None and logprobs is not None:
            self.decider.ragged.confidence.observe(logprobs, accepted, lens)
        if self.decider is not None and step.plan is not None and seconds is not None:
            self.decider.observe(step.plan, seconds)

    def leave_out(self, why: str) -> None:
        """A step gets no result, or a result has no step. They are counted, and the first one is logged."""
        self.metrics.left_out += 1
        if self.metrics.left_out == 1:
            logger.warning(
                "dflash_sglang verify width: %s: expected one result for each step. The estimates leave it out; "
                "steps go on, perhaps at a width that is not the fastest. Later ones are counted in "
                "/server_info as left_out and not logged.",
                why,
            )
