"""The width of every decode step: what the policy is told of the worker's steps, and what follows its choice."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_sglang.observe.counts import DoneStep
from dflash_sglang.requests.limits import width_bounds
from dflash_sglang.settings.width import PLAIN
from dflash_sglang.verify.rows import Excluded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from dflash_sglang.observe.observer import Observer
    from dflash_sglang.verify.step_clock import StepClock
    from dflash_sglang.verify.step_result import StepResult
    from dflash_sglang.width.decider import Decision
    from dflash_sglang.width.policy import Step, WidthPolicy
    from dflash_sglang.width.runtime_states import RuntimeStates

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0  # between two lines about changes of the width
NOTHING_EXCLUDED = Excluded()
MOST_IN_FLIGHT = 8  # steps that were launched and did not come back; overlap scheduling has at most two


class _Chosen(NamedTuple):
    """A decode step whose result is to come."""

    step: Step
    most: np.ndarray  # [n] tokens that it may commit of each request
    context_tokens: int  # of its requests together
    whole: str | None  # why it had to have the width of each request, or no trees
    reqs: Sequence[Req]  # at least its requests, in their order
    start: Any  # end of the step before, as a `StepClock.mark`; None if none of its requests is in this one


class _Launched(NamedTuple):
    """The same when it was launched."""

    chosen: _Chosen
    result: StepResult
    end: Any

    def has(self, accepted: list[int]) -> bool:
        """Whether SGLang took this list of accepted proposals from the step's result."""
        return self.result.num_correct_drafts_per_req_cpu is accepted


class WidthController:
    """Asks the policy before each decode step and tells it of the results, which overlap scheduling has later.

    A step takes as long as it is from the end of the step before to its own. Prefills in between count, if a
    request of the step before waited for them. The time of any other step is unknown.
    """

    def __init__(
        self,
        policy: WidthPolicy,
        states: RuntimeStates,
        limit: Callable[[np.ndarray, np.ndarray], None],
        clock: StepClock,
        observer: Observer,
        speaks: bool = True,
    ) -> None:
        """limit: sets what a step may commit of requests (`Acceptor.set_max_commit`). speaks: this rank logs."""
        self._policy, self._states, self._limit, self._clock = policy, states, limit, clock
        self.learns, self.choices = policy.learns, policy.widths  # see `WidthPolicy`
        self._observer = observer
        self._chosen: _Chosen | None = None  # the latest step with requests
        self._launched: deque[_Launched] = deque()
        self._last_end: Any = None  # of the latest step, unless a step of other ranks came after it
        self._new: set[int] = set()  # slots of requests that were admitted since
        self._speaks, self._logged_changes, self._logged_at = speaks, 0, -LOG_SECONDS

    def prefill(self, batch: ScheduleBatch) -> None:
        """Before a batch is prefilled, or another rank's: its new requests take their slots."""
        self._policy.prefill(sum(batch.extend_lens or ()))
        self._states.use_widest()
        self.admit(batch)

    def admit(self, batch: ScheduleBatch) -> None:
        """New requests of a batch take their slots. Those that another server has prefilled cost no step."""
        slots, least, most = new_requests(batch, self._policy.requests.longest)
        if len(slots):
            self._new.update(slots.tolist())
            self._policy.admit(slots, most.tolist(), least.tolist())
            self._limit(slots, most)

    def next(self, batch: ScheduleBatch, excluded: Excluded = NOTHING_EXCLUDED) -> Decision:
        """The width of a decode step of this batch, or of other ranks' where it is empty."""
        policy, requests = self._policy, len(batch.reqs)
        if not requests:  # it has no result
            step = policy.choose(np.zeros(0, np.int64), 0, not excluded.ragged, not excluded.trees, 0)
            policy.verified(step, [])
            self._last_end = None
        else:
            slots, context = batch.req_pool_indices_cpu.numpy(), batch.spec_info.committed_sum
            longest = batch.spec_info.chain if policy.chains and not excluded.copies else 0
            step = policy.choose(slots, context, not excluded.ragged, not excluded.trees, longest)
            if self._new.issuperset(slots.tolist()):
                self._last_end = None
            whole = excluded.ragged
            if whole is None and policy.budgets and policy.requests.floor(slots) > PLAIN:
                whole = "min_width"
            if whole is None and requests <= policy.most_trees:
                whole = excluded.trees
            most = policy.requests.most(slots)
            self._chosen = _Chosen(step, most, context, whole, batch.reqs, self._last_end)
        self._new.clear()
        self._states.use(step.decision.shape)
        if self._speaks and not step.decision.probe:
            self._log_change(step.decision, requests)
        return step.decision

    def returned(self, result: StepResult) -> None:
        """The step that `next` was asked for last has been launched."""
        assert self._chosen is not None
        if len(self._launched) == MOST_IN_FLIGHT:
            self._launched.popleft()
            self._policy.leave_out(f"{MOST_IN_FLIGHT} steps were launched and none came back")
        self._last_end = self._clock.mark()
        self._launched.append(_Launched(self._chosen, result, self._last_end))

    def verified(self, accepted: list[int]) -> None:
        """A step with requests came back: accepted [n] proposals, the list itself that its result has. Steps
        before it that did not come back are lost."""
        if not any(launched.has(accepted) for launched in self._launched):
            self._policy.leave_out(f"a result of {len(accepted)} requests that no step waits for")
            return
        while not (done := self._launched.popleft()).has(accepted):
            self._policy.leave_out("a step came back before the one that was launched before it")
        chosen, of = done.chosen, done.result
        seconds = None if chosen.start is None else self._clock.seconds(chosen.start, done.end)
        drafted = of.logprobs, of.verified_lens, of.mass, of.promised
        logprobs, lens, mass, promised = (None if of is None else of.numpy() for of in drafted)
        self._policy.verified(chosen.step, accepted, seconds, logprobs, lens, mass, promised)
        if len(accepted) == len(chosen.most):  # else the policy has left it out
            width, _, nodes, chain = chosen.step.decision.shape
            copied = None if promised is None else promised > 0
            step = DoneStep(width, accepted, chosen.most, lens, chosen.whole, nodes, chain, copied)
            self._observer.verified(step, chosen.context_tokens)
            more = step.proposals - (self._observer.block - 1)
            if more.any():
                _count_proposals(chosen.reqs, more.tolist())

    def _log_change(self, decision: Decision, requests: int) -> None:
        """One line if the shape has changed, not more often than every `LOG_SECONDS`."""
        metrics = self._policy.metrics
        changes = metrics.changes - self._logged_changes
        if not changes or (now := time.perf_counter()) - self._logged_at < LOG_SECONDS:
            return
        logger.info(
            "dflash_sglang verify width: %s at %d requests (%s; %d changes since the last line); estimated "
            "tokens/s by the table of step times: %.2f of those at width 1, %.2f of those at the whole block",
            decision.kind,
            requests,
            metrics.last_change,
            changes,
            metrics.over_width_1,
            metrics.over_block,
        )
        self._logged_changes, self._logged_at = metrics.changes, now

    def report(self, reporter: Any) -> None:
        """After SGLang's decode line, see `Observer.report`."""
        self._observer.report(reporter)

    def snapshot(self) -> dict[str, Any]:
        """What /server_info tells of widths and acceptance."""
        return {
            "dflash_width": self._policy.snapshot(),
            "dflash_acceptance": self._observer.snapshot(),
        }


def _count_proposals(reqs: Sequence[Req], more: Sequence[int]) -> None:
    """Adds how many proposals [n] a step verified beyond a whole block's, or below them, to what requests are told
    of (`patches.results.of_an_answer`). SGLang counts no step of a request that has ended or was retracted."""
    for req, of_step in zip(reqs, more, strict=False):
        if of_step and req.finished_reason is None and not req.is_retracted:
            req.spec_num_cap_tokens += of_step


def new_requests(batch: ScheduleBatch, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots [n], narrowest and widest steps [n], up to `longest` rows, of a batch's new requests. A mixed prefill
    decodes others, its last rows. Requests that were refused are prefilled as well, with one token."""
    new = batch.reqs[: len(batch.reqs) - len(batch.decoding_reqs or ())]
    asked = [(None, None) if req.to_finish else width_bounds(req.sampling_params.custom_params) for req in new]
    narrowest = [min(least or PLAIN, longest) for least, _ in asked]
    widest = [min(most or longest, longest) for _, most in asked]
    slots = batch.req_pool_indices_cpu[: len(new)].numpy() if new else np.zeros(0, np.int64)
    return slots, np.array(narrowest, np.int64), np.array(widest, np.int64)
