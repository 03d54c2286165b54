"""WidthPolicy: what the worker asks for the width of the next step, and tells of those that came back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.width.acceptance import Acceptance
from dflash_sglang.width.decider import Decider, Decision, Load, Plan
from dflash_sglang.width.group import Group
from dflash_sglang.width.metrics import WidthMetrics
from dflash_sglang.width.step_times import StepTimesError

logger = logging.getLogger(__name__)

MOST_IN_FLIGHT = 8  # steps that were chosen and not verified; overlap scheduling has at most two


class _InFlight(NamedTuple):
    step: int
    slots: np.ndarray
    decision: Decision
    plan: Plan | None


class WidthPolicy:
    """One width for every step of the whole batch.

    Serving: `prefill` for every prefill of any rank, `admit` when a request is prefilled, `choose` before each
    decode step, `verified` when its result is on the host, in the order of the steps. Overlap scheduling chooses a
    step or two ahead of what it was told. A result that comes back after its request's slot was given away is
    dropped.

    All ranks of a group make the same calls of `choose` in the same order. Rank 0 decides (`decider`), the others
    are told. Every rank estimates the acceptance of its own requests. Nothing here reads a clock or draws.

    Records of steps in flight decide nothing but estimates. A result that fits no record, or a record that gets no
    result, is left out of the estimates, counted in `metrics.left_out`, and logged the first time.
    """

    def __init__(
        self,
        config: WidthConfig,
        block: int,
        buckets: Sequence[int],
        max_requests: int,
        group: Group | None = None,
        slots: int | None = None,
        budgets: Sequence[int] | None = None,
    ):
        """`block`: the widest block that is served. `buckets`: captured batch sizes, the largest at least
        `max_requests`, which run at once on this rank. Requests are named by slots in [0, `slots`), by default
        [0, `max_requests`].

        `budgets`, ascending: how many tokens a ragged step may verify together; without, steps are not ragged."""
        if buckets[-1] < max_requests:
            raise StepTimesError(
                f"buckets end at {buckets[-1]}: expected at least max_requests={max_requests}. Add the batch "
                "sizes that run without a graph."
            )
        self.widths = config.states(block)
        self.buckets, self.budgets = list(buckets), budgets
        self.acceptance = Acceptance(self.widths, max_requests + 1 if slots is None else slots)
        self.metrics = WidthMetrics(self.widths)
        self._group = group or Group()
        self._fixed = Decision(self.widths[0]) if config.fixed is not None else None
        self.decider: Decider | None = None
        if self._fixed is None and self._group.decides:
            self.decider = Decider(self.acceptance, buckets, max_requests, budgets)
        # A rank whose requests are rank 0's has nothing to say, so it learns nothing of them.
        self._has_a_say = self.decider is not None or (self._fixed is None and self._group.gather is not None)
        self._held = 0, 1.0  # index of the width of the latest step that was no probe, and its share
        self._step = 0
        self._in_flight: deque[_InFlight] = deque()

    def admit(
        self, slots: np.ndarray, max_widths: Sequence[int] | None = None, min_widths: Sequence[int] | None = None
    ) -> None:
        """New requests in these slots [n], with the `max_width` and the `min_width` of each."""
        self.acceptance.admit(slots, self._step, max_widths, min_widths)

    def prefill(self) -> None:
        """The next decode step comes after a prefill, of this rank's requests or of another's."""
        if self.decider is not None:
            self.decider.interruptions.prefill()

    def choose(self, slots: np.ndarray, context_tokens: int, needs_full_blocks: bool = False) -> Decision:
        """The width of the next step for the requests in `slots` [n], whose contexts have `context_tokens`
        together.

        No slots: another rank has requests. `needs_full_blocks`: the step verifies the width of every request.
        With `MOST_IN_FLIGHT` steps in flight the oldest one is lost (`lose`)."""
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            self.lose(f"{MOST_IN_FLIGHT} steps were chosen and none verified")
        slots = np.array(slots, np.intp)
        if self._fixed is not None:
            decision, plan = self._fixed, None
        else:
            decision, plan = self._decide(slots, context_tokens, needs_full_blocks)
        self._in_flight.append(_InFlight(self._step, slots, decision, plan))
        self._step += 1
        self.metrics.chose(decision, len(slots))
        return decision

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
        accepted: Sequence[int] | np.ndarray,
        seconds: float | None = None,
        logprobs: np.ndarray | None = None,
        lens: np.ndarray | None = None,
    ) -> None:
        """The oldest step that is in flight came back: `accepted` [n] proposals, and how long it took.

        logprobs [n, steps]: of what was drafted, where the draft gives them. lens [n]: verified tokens of each
        request; None: full blocks. `seconds`: from the end of the step before to the end of this one, so that the
        host's share counts; None where something else ran in between (a prefill). A result is dropped if no step
        is in flight; result and step are dropped if [n] is not that step's.
        """
        if not self._in_flight:
            self.stray(len(accepted))
            return
        done = self._in_flight[0]
        if len(accepted) != len(done.slots):
            self.lose(f"{len(accepted)} results for step {done.step} of {len(done.slots)} requests")
            return
        self._in_flight.popleft()
        self.metrics.came_back(done.decision, seconds)
        if not self._has_a_say:
            return
        accepted, width = np.asarray(accepted, np.int64), self.widths.index(done.decision.width)
        self.acceptance.observe(done.step, done.slots, width, accepted, lens)
        if self.decider is not None and self.decider.ragged is not None and logprobs is not None:
            self.decider.ragged.confidence.observe(logprobs, accepted, lens)
        if self.decider is not None and done.plan is not None and seconds is not None:
            self.decider.observe(done.plan, seconds)

    def lose(self, why: str) -> None:
        """The oldest step in flight gets no result that can be used."""
        if self._in_flight:
            self._in_flight.popleft()
        self._leave_out(why)

    def stray(self, requests: int) -> None:
        """A result of so many requests came back that no step in flight waits for."""
        self._leave_out(f"a result of {requests} requests that no step waits for")

    def _leave_out(self, why: str) -> None:
        self.metrics.left_out += 1
        if self.metrics.left_out == 1:
            logger.warning(
                "dflash_sglang verify width: %s: expected one result for each step. The estimates leave it out; "
                "steps go on, perhaps at a width that is not the fastest. Later ones are counted in "
                "/server_info as left_out and not logged.",
                why,
            )
