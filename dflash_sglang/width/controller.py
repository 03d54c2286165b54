"""The width of every decode step: what the policy is told of the worker's steps, and what follows its choice."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_sglang.requests.width_bounds import width_bounds
from dflash_sglang.settings.width import PLAIN
from dflash_sglang.width.policy import MOST_IN_FLIGHT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from dflash_sglang.verify.step_clock import StepClock
    from dflash_sglang.verify.step_result import StepResult
    from dflash_sglang.width import Decision, WidthPolicy
    from dflash_sglang.width.runtime_states import RuntimeStates

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0  # between two lines about changes of the width


@dataclass
class _Step:
    """A decode step whose result is to come; one without requests has none."""

    requests: int
    follows: bool  # on a step with requests, nothing in between
    result: StepResult | None = None
    end: Any = None  # `StepClock.mark`

    def has(self, accepted: list[int]) -> bool:
        """Whether SGLang took this list of accepted proposals from the step's result."""
        return self.result is not None and self.result.num_correct_drafts_per_req_cpu is accepted


class WidthController:
    """Asks the policy before each decode step and tells it of the results, which overlap scheduling has later.

    A step takes as long as it is from the end of the step before to its own. Unknown is the time of a step that
    follows anything else.
    """

    def __init__(
        self,
        policy: WidthPolicy,
        states: RuntimeStates,
        limit: Callable[[np.ndarray, np.ndarray], None],
        clock: StepClock,
        speaks: bool = True,
    ) -> None:
        """limit: sets what a step may commit of requests (`Acceptor.set_max_commit`). speaks: this rank logs."""
        self._policy, self._states, self._limit, self._clock = policy, states, limit, clock
        self._steps: deque[_Step] = deque()
        self._after_step = False
        self._last_end: Any = None
        self._log = _ChangeLog() if speaks else None

    @property
    def choices(self) -> Sequence[int]:
        """Widths that steps may have, ascending."""
        return self._policy.widths

    def prefill(self, batch: ScheduleBatch) -> None:
        """Before a batch is prefilled, or another rank's: its new requests take their slots."""
        self._after_step = False
        self._policy.prefill()
        self._states.use_widest()
        slots, least, most = new_requests(batch, self._policy.acceptance.block)
        if len(slots):
            self._policy.admit(slots, most.tolist(), least.tolist())
            self._limit(slots, most)

    def next(self, batch: ScheduleBatch, needs_full_blocks: bool = False) -> Decision:
        """The width of a decode step of this batch, or of other ranks' where it is empty.

        needs_full_blocks: the step verifies the width of each request."""
        requests = len(batch.reqs)
        slots = batch.req_pool_indices_cpu.numpy() if requests else np.zeros(0, np.int64)
        decision = self._policy.choose(slots, batch.spec_info.committed_sum if requests else 0, needs_full_blocks)
        if len(self._steps) >= MOST_IN_FLIGHT:  # the policy has lost it, too
            self._last_end = self._steps.popleft().end
        self._steps.append(_Step(requests, self._after_step))
        self._after_step = requests > 0
        self._pass_over_empty_steps()
        self._states.use(decision.width, ragged=decision.verify_budget is not None)
        if self._log is not None and not decision.probe:
            self._log.note(self._policy, decision.width, requests)
        return decision

    def returned(self, result: StepResult) -> None:
        """The step that `next` was asked for last has been launched."""
        self._steps[-1].result, self._steps[-1].end = result, self._clock.mark()

    def verified(self, accepted: list[int]) -> None:
        """A step with requests came back: accepted [n] proposals, the list itself that its result has. Steps
        before it that did not come back are lost."""
        if not any(step.has(accepted) for step in self._steps):
            self._policy.stray(len(accepted))
            return
        while not (step := self._steps.popleft()).has(accepted):
            if step.requests:
                self._policy.lose("a step came back before the one that was launched before it")
                self._last_end = step.end
            else:
                self._policy.verified([])
        assert step.result is not None
        timed = step.follows and self._last_end is not None
        seconds = self._clock.seconds(self._last_end, step.end) if timed else None
        drafted = step.result.logprobs, step.result.verified_lens
        self._policy.verified(accepted, seconds, *(None if of is None else of.numpy() for of in drafted))
        self._last_end = step.end
        self._pass_over_empty_steps()

    def _pass_over_empty_steps(self) -> None:
        while self._steps and not self._steps[0].requests:
            self._steps.popleft()
            self._policy.verified([])

    def snapshot(self) -> dict[str, Any]:
        """What the server tells of its widths."""
        return self._policy.metrics.snapshot()


def new_requests(batch: ScheduleBatch, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots [n], narrowest and widest blocks [n] of the requests that a batch prefills. A mixed one decodes
    others, its last rows. Requests that were refused are prefilled as well, with one token."""
    new = batch.reqs[: len(batch.reqs) - len(batch.decoding_reqs or ())]
    asked = [(None, None) if req.to_finish else width_bounds(req.sampling_params.custom_params) for req in new]
    narrowest = [min(least or PLAIN, block) for least, _ in asked]
    widest = [min(most or block, block) for _, most in asked]
    slots = batch.req_pool_indices_cpu[: len(new)].numpy() if new else np.zeros(0, np.int64)
    return slots, np.array(narrowest, np.int64), np.array(widest, np.int64)


class _ChangeLog:
    """One line when the width has changed, not more often than every `LOG_SECONDS`."""

    def __init__(self) -> None:
        self._changes = 0
        self._last = -LOG_SECONDS

    def note(self, policy: WidthPolicy, width: int, requests: int) -> None:
        metrics = policy.metrics
        if metrics.changes == self._changes or (now := time.perf_counter()) - self._last < LOG_SECONDS:
            return
        logger.info(
            "dflash_sglang verify width: %d at %d requests (%s; %d changes since the last line); estimated gain "
            "%.2f over plain decoding, %.2f over the whole block",
            width,
            requests,
            metrics.last_change,
            metrics.changes - self._changes,
            metrics.gain_over_plain,
            metrics.gain_over_full,
        )
        self._changes, self._last = metrics.changes, now
