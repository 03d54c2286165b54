"""The width of every decode step: what the policy is told of the worker's steps, and what follows its choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
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
    from dflash_sglang.width.policy import Stretch, WidthPolicy
    from dflash_sglang.width.runtime_states import RuntimeStates

NOTHING_EXCLUDED = Excluded()
NO_SLOTS = np.zeros(0, np.int64)
MOST_IN_FLIGHT = 8  # steps that were launched and did not come back; overlap scheduling has at most two


class _Current(NamedTuple):
    """The stretch that steps belong to now."""

    stretch: Stretch
    most: np.ndarray  # [n] tokens that a step may commit of each request
    context_tokens: int  # of its requests together, at its start
    whole: str | None  # why it had to have the width of each request, or no trees
    reqs: Sequence[Req]  # at least its requests, in their order
    as_block: bool  # each of its steps verifies a block's proposals of each request
    marks: list[Any]  # of a `StepClock`: the end of the step before, None if unknown, and of each of its steps
    waited: list[bool]  # of its steps, whether the device waited for the host


@dataclass
class _Launched:
    """A step whose result is to come."""

    of: _Current
    result: StepResult
    last: bool = False  # of its stretch

    def has(self, accepted: list[int]) -> bool:
        """Whether SGLang took this list of accepted proposals from the step's result."""
        return self.result.num_correct_drafts_per_req_cpu is accepted


class WidthController:
    """Asks the policy before each decode step and tells it of the results, which overlap scheduling has later.

    A step takes as long as it is from the end of the step before to its own; unknown where requests came in
    between. Of a stretch the median counts.
    """

    def __init__(
        self,
        policy: WidthPolicy,
        states: RuntimeStates,
        limit: Callable[[np.ndarray, np.ndarray], None],
        clock: StepClock,
        observer: Observer,
    ) -> None:
        """limit: sets what a step may commit of requests (`Acceptor.set_max_commit`)."""
        self._policy, self._states, self._limit, self._clock = policy, states, limit, clock
        self.learns, self.choices = policy.learns, policy.widths  # see `WidthPolicy`
        self._observer = observer
        self._current: _Current | None = None
        self._launched: deque[_Launched] = deque()
        self._mark: Any = None  # end of the latest step, unless something else came after it

    def prefill(self, batch: ScheduleBatch) -> None:
        """Before a batch is prefilled, or another rank's: its new requests take their slots."""
        self._policy.prefill()
        self._states.use_widest()
        self.admit(batch)

    def admit(self, batch: ScheduleBatch) -> None:
        """New requests of a batch take their slots, which this server or another has prefilled."""
        self._end()
        self._mark = None
        slots, least, most = new_requests(batch, self._policy.requests.longest)
        if len(slots):
            self._policy.admit(slots, most.tolist(), least.tolist())
            self._limit(slots, most)

    def next(self, batch: ScheduleBatch, excluded: Excluded = NOTHING_EXCLUDED) -> Decision:
        """The width of a decode step of this batch, or of other ranks' where it is empty."""
        policy, info = self._policy, batch.spec_info
        if not batch.reqs:  # it has no result
            stretch = policy.choose(NO_SLOTS, 0, not excluded.ragged, not excluded.trees, 0)
            self._end()
            self._mark = None
            self._states.use(stretch.decision.shape)
            return stretch.decision
        slots = batch.req_pool_indices_cpu.numpy()
        longest = info.chain if policy.chains and not excluded.copies else 0
        stretch = policy.choose(slots, info.committed_sum, not excluded.ragged, not excluded.trees, longest)
        if self._current is None or stretch is not self._current.stretch:
            self._begin(stretch, batch, excluded)
        return stretch.decision

    def _begin(self, stretch: Stretch, batch: ScheduleBatch, excluded: Excluded) -> None:
        """The next step is the first of this stretch."""
        policy, slots, requests = self._policy, stretch.slots, len(stretch.slots)
        self._end()
        whole = excluded.ragged
        if whole is None and policy.budgets and policy.requests.floor(slots) > PLAIN:
            whole = "min_width"
        if whole is None and requests <= policy.most_trees:
            whole = excluded.trees
        context, most = batch.spec_info.committed_sum, policy.requests.most(slots)
        shape, block = stretch.decision.shape, self._observer.block
        as_block = shape.budget is None and (shape.chain or shape.width) == block <= int(most.min())
        self._current = _Current(stretch, most, context, whole, batch.reqs, as_block, [self._mark], [])
        self._states.use(shape)

    def _end(self) -> None:
        """The latest step was the last of its stretch."""
        current, self._current = self._current, None
        if current is not None and self._launched and self._launched[-1].of is current:
            self._launched[-1].last = True
        elif current is not None:
            self._time(current)

    def _time(self, of: _Current) -> None:
        """All results of a stretch are there."""
        ends = of.marks if of.marks[0] is not None else of.marks[1:]
        seconds = [self._clock.seconds(start, end) for start, end in pairwise(ends)]
        if seconds:
            self._policy.timed(of.stretch, median(seconds), len(seconds), 2 * sum(of.waited) > len(of.waited))

    def returned(self, result: StepResult) -> None:
        """The step that `next` was asked for last has been launched."""
        assert self._current is not None
        self._mark = self._clock.mark()
        self._current.marks.append(self._mark)
        if self._launched:
            self._current.waited.append(self._clock.waited(self._launched[-1].result.copy_done))
            if len(self._launched) == MOST_IN_FLIGHT:
                self._launched.popleft()
                self._policy.leave_out(f"{MOST_IN_FLIGHT} steps were launched and none came back")
        self._launched.append(_Launched(self._current, result))

    def verified(self, accepted: list[int]) -> None:
        """A step with requests came back: accepted [n] proposals, the list itself that its result has. Steps
        before it that did not come back are lost."""
        if not any(launched.has(accepted) for launched in self._launched):
            self._policy.leave_out(f"a result of {len(accepted)} requests that no step waits for")
            return
        while not (done := self._launched.popleft()).has(accepted):
            self._policy.leave_out("a step came back before the one that was launched before it")
        of, result = done.of, done.result
        logprobs, lens, mass, promised = result.drafted()
        self._policy.verified(of.stretch, accepted, logprobs, lens, mass, promised)
        if done.last:
            self._time(of)
        if len(accepted) == len(of.most):  # else the policy has left it out
            width, _, nodes, chain = of.stretch.decision.shape
            copied = None if promised is None else promised > 0
            step = DoneStep(width, accepted, of.most, lens, of.whole, nodes, chain, copied)
            self._observer.verified(step, of.context_tokens)
            if not of.as_block:
                _count_proposals(of.reqs, (step.proposals - (self._observer.block - 1)).tolist())

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
