"""WidthPolicy: what the worker asks for the shape of its steps, and tells of those that came back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN, WidthConfig
from dflash_sglang.verify.rows import Shape
from dflash_sglang.width.confidence import Confidence
from dflash_sglang.width.decider import Decider, Decision, Load, Plan
from dflash_sglang.width.options import AllOptions, Kind, kinds_of
from dflash_sglang.width.ranks import Group
from dflash_sglang.width.requests import Chains, Requests

logger = logging.getLogger(__name__)

LEARNT_FROM = 256  # requests of a step; of more every second, third, ... in turn
# Chosen in the simulation (docs/results/width-simulated.md).
HOLD = 16  # steps that a decision holds, once as many have gone by without another one
HOLD_COPIES = 4  # the same of steps with copies beyond blocks


class WidthMetrics:
    """Counters since start-up, by kind, and the last decision's estimates (docs/reference/metrics.md)."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self.steps, self.probes = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        self.changes, self.last_change = 0, "start"
        self.over_width_1 = self.over_block = 1.0
        self.left_out = 0  # steps without a result, and results without a step

    def chose(self, decision: Decision) -> None:
        if decision.reason not in ("hold", "probe", "copy"):
            self.changes += decision.reason != "start"
            self.last_change = decision.reason
        self.over_width_1, self.over_block = decision.over_width_1, decision.over_block

    def ran(self, decision: Decision, steps: int) -> None:
        """So many steps of it were launched."""
        self.steps[decision.kind] += steps
        self.probes[decision.kind] += steps * decision.probe

    def snapshot(self) -> dict[str, Any]:
        """For logs and gauges: steps by the width that was drafted and by kind."""
        by_width: dict[str, dict[int, int]] = {}
        for name, counts in (("steps", self.steps), ("probes", self.probes)):
            of_name = by_width[name] = {kind.width: 0 for kind in counts}
            for kind, count in counts.items():
                of_name[kind.width] += count
        return {
            **by_width,
            "shapes": {str(kind): count for kind, count in self.steps.items()},
            "changes": self.changes,
            "last_change": self.last_change,
            "estimated_over_width_1": self.over_width_1,
            "estimated_over_block": self.over_block,
            "left_out": self.left_out,
        }


@dataclass(eq=False)
class Stretch:
    """Steps of one decision and of the same requests, one after the other."""

    number: int  # of the first one
    slots: np.ndarray  # [n] of the requests
    decision: Decision
    plan: Plan | None
    situation: tuple[Any, ...]  # what else the decision holds for
    steps: int = 1  # so far
    counted: int = 0  # of these, by the metrics


class Result(NamedTuple):
    """What came back of a step, as `WidthPolicy.verified` has it."""

    stretch: Stretch
    accepted: Sequence[int] | np.ndarray
    logprobs: np.ndarray
    lens: np.ndarray | None
    mass: np.ndarray | None
    promised: np.ndarray | None


class WidthPolicy:
    """One shape for every step of the whole batch.

    Serving: `prefill` for every prefill of any rank, `admit` when a request is prefilled, `choose` before each
    decode step, `verified` when its result is on the host, `timed` when a stretch has ended. Overlap scheduling
    chooses a step or two ahead of what it was told. A result that comes back after its request's slot was given
    away is dropped.

    A decision is for 1, 2, 4, ... up to `HOLD` steps while the next one is the same, a probe for one. It ends
    early when another batch comes, its steps may be of other forms, something was prefilled, or a copy came true
    to the end of a block. What came back of steps is learnt before the next decision.

    All ranks of a group make the same calls of `choose` and `prefill` in the same order, and so decide in the same
    steps. Rank 0 decides (`decider`), the others are told. Every rank estimates what its own requests accept.
    Nothing here reads a clock or draws.

    Results change estimates alone, but for that copy, which ends a decision of a rank that is alone. One that is
    lost or fits no step is left out (`leave_out`).
    """

    def __init__(
        self,
        config: WidthConfig,
        block: int,
        buckets: Sequence[int],
        slots: int,
        group: Group | None = None,
        budgets: Sequence[int] | None = None,
        trees: Mapping[int, int] | None = None,
        chains: Mapping[int, int] | None = None,
    ):
        """`block`: the widest block that is served. `buckets`, ascending: the batch sizes that steps are padded
        to, the last one for all requests that can run. Requests are named by slots in [0, `slots`).

        `budgets`, ascending: how many tokens a ragged step may verify together, the last one enough for full
        blocks of all requests; without, steps are not ragged. `trees`: {nodes: most requests of a batch}.
        `chains`: {rows: most requests of a batch} of chains beyond the block, where the width is not fixed.

        Ranks with requests of their own have chains only."""
        self.widths = config.states(block)
        self.buckets, self.budgets, self.trees = list(buckets), budgets, dict(trees or {})
        self.kinds = kinds_of(self.widths, budgets is not None, self.trees)
        self.chains = Chains(block, slots, chains or {})
        self.requests = Requests(block, slots, self.chains.longest)
        self.confidence = Confidence(block, self.trees)
        self.metrics = WidthMetrics([*self.kinds, *(Kind(block, chain=rows) for rows in chains or ())])
        self._options = AllOptions(self.kinds, budgets or [], self.confidence)
        self._group = group or Group()
        self._fixed = None if config.fixed is None else Decision(self.widths[-1])
        self.most_trees = max(self.trees.values(), default=0)  # requests of a batch
        self.decider: Decider | None = None
        if self._fixed is None and self._group.decides:
            self.decider = Decider(self.kinds, buckets, self.trees)
        # Whether results tell anything: not to a rank whose requests are rank 0's, which has nothing to say.
        self.learns = self.decider is not None or (self._fixed is None and self._group.gather is not None)
        self._held = self.widths[0], 1.0  # width of the latest decision that was no probe, and its share
        self._kind: Kind | None = None  # of the same
        self._steps = 0
        self._stretch: Stretch | None = None
        self._decision, self._decided = Decision(self.widths[-1]), 0  # the latest one, and the step it was for
        self._hold, self._until = 1, 0  # steps of the latest one that was no probe; the step after those it is for
        self._prefilled = False  # since the latest step
        self._results: list[Result] = []

    def admit(
        self, slots: np.ndarray, max_widths: Sequence[int] | None = None, min_widths: Sequence[int] | None = None
    ) -> None:
        """New requests in these slots [n], with the `max_width` and the `min_width` of each."""
        self._end()
        self.requests.admit(slots, self._steps, max_widths, min_widths)
        self.chains.admit(slots)

    def prefill(self) -> None:
        """The next decode step comes after a prefill of this rank or another."""
        self._end()
        self._prefilled, self._until = True, 0

    def choose(
        self,
        slots: np.ndarray,
        context_tokens: int,
        ragged: bool = True,
        trees: bool = True,
        longest: int = 0,
    ) -> Stretch:
        """The stretch of which the next step is, for the requests in `slots` [n], whose contexts have
        `context_tokens` together.

        No slots: another rank has requests. `ragged`, `trees`: whether the step may be. `longest`: rows of the
        longest chain beyond the block that it may verify; 0: none."""
        situation, stretch, number = (slots.tobytes(), ragged, trees, longest), self._stretch, self._steps
        self._steps += 1
        if number < self._until and stretch is not None and situation == stretch.situation:
            stretch.steps += 1
            return stretch
        self._end()
        slots, plan = slots.astype(np.intp), None
        if number >= self._until or self._group.gather is None:
            for _, results in groupby(self._results, key=attrgetter("stretch")):
                self._learn(list(results))
            self._results.clear()
            decision, plan = self._decide(slots, context_tokens, *situation[1:], number - self._decided)
            self.metrics.chose(decision)
            self._until = number + self._held_for(decision)
            self._decision, self._decided, self._prefilled = decision, number, False
        # Else all ranks hold their decision: one by itself cannot end it.
        self._stretch = Stretch(number, slots, self._decision, plan, situation)
        return self._stretch

    def _held_for(self, decision: Decision) -> int:
        """Steps that a new decision is for; the same on all ranks."""
        if decision.chain is not None:
            return HOLD_COPIES
        if decision.probe:
            return 1
        # Results, which tell of copies, end nothing where ranks decide together.
        longest = HOLD_COPIES if self._group.broadcast is not None and self.chains else HOLD
        same = decision.kind == self._kind
        self._kind, self._hold = decision.kind, min(2 * self._hold, longest) if same else 1
        # After a prefill, ranks with requests of their own know those of the others by the step after the next.
        return 1 if self._prefilled and self._group.gather is not None else self._hold

    def _end(self) -> None:
        """The next step is none of the stretch so far."""
        self._count()
        self._stretch = None

    def _count(self) -> None:
        if (stretch := self._stretch) is not None:
            self.metrics.ran(stretch.decision, stretch.steps - stretch.counted)
            stretch.counted = stretch.steps

    def _decide(
        self, slots: np.ndarray, context: int, ragged: bool, trees: bool, longest: int, steps: int
    ) -> tuple[Decision, Plan | None]:
        """This rank's decision, or what the deciding rank tells; with the plan, on that rank. steps: since the
        decision before."""
        group, decision, plan = self._group, self._fixed or Decision(self.widths[-1]), None
        known = self.requests
        if self._fixed is not None:
            few = 0 < len(slots) <= self.most_trees
            if trees and few and known.cap(slots) == known.block and known.floor(slots) == PLAIN:
                decision = Decision(decision.width, tree_nodes=self.kinds[-1].nodes)
            return decision, None
        if self.learns:
            n = len(slots)
            options = self._options.of(n)
            needed = known.steps_needed(slots, self._held, options.width, options.share)
            load = Load(n, n, float(context), known.cap(slots), known.floor(slots), needed)
            if group.gather is not None:
                load = Load.from_rows(group.gather(load.row()))
            if self.decider is not None:
                decision, plan = self.decider.decide(load, options, ragged, trees, steps, self._prefilled)
                if 0 < longest <= known.most(slots).max() and self.chains.pay(slots):
                    shape = Shape(known.block, chain=longest)
                    decision = Decision(*shape, "copy", *decision[5:])
                    plan = None  # the tables know nothing of such steps
        if group.broadcast is not None:
            decision = Decision.from_row(group.broadcast(decision.row()))
        if not decision.probe and decision.chain is None:
            self._held = decision.width, decision.share
        return decision, plan

    def verified(
        self,
        stretch: Stretch,
        accepted: Sequence[int] | np.ndarray,
        logprobs: np.ndarray | None = None,
        lens: np.ndarray | None = None,
        mass: np.ndarray | None = None,
        promised: np.ndarray | None = None,
    ) -> None:
        """A step of a stretch came back, with `accepted` [n] proposals.

        logprobs [n, steps]: of the likeliest proposals; None where nothing was drafted. lens [n]: verified tokens
        of each request of a ragged step. mass [n, nodes]: of each node of a tree the log-probability, with those
        above it. promised [n]: of copies, see `Proposals`."""
        n = len(stretch.slots)
        if len(accepted) != n:
            self.leave_out(f"{len(accepted)} results for a step from {stretch.number} on of {n} requests")
            return
        if not self.learns or logprobs is None or not n or not logprobs.shape[1]:
            return
        self._results.append(Result(stretch, accepted, logprobs, lens, mass, promised))
        if stretch.situation[-1] and promised is not None and self._group.broadcast is None:
            decision = stretch.decision
            if decision.chain is None and max(accepted) == decision.width - 1 and promised.any():
                self._until = 0  # the copy may go on

    def timed(self, stretch: Stretch, seconds: float, steps: int = 1, waited: bool = False) -> None:
        """So many steps of a stretch took so long each (their median), from the end of the step before to their
        own, with nothing prefilled in between. waited: the device waited for the host."""
        if self.decider is not None and stretch.plan is not None:
            bucket, kind, context, more = stretch.plan
            self.decider.step_times.observe(bucket, kind, context, seconds, more, steps, waited)

    def _learn(self, results: Sequence[Result]) -> None:
        """From steps of one stretch."""
        stretch = results[0].stretch
        known = np.flatnonzero(self.requests.are_in(stretch.slots, stretch.number))
        every = -(-len(known) // LEARNT_FROM) or 1
        known = known[stretch.number % every :: every]
        if not len(known):
            return
        slots, shape = stretch.slots[known], stretch.decision.shape
        # [steps, requests, ...] each
        accepted = np.array([of.accepted for of in results])[:, known]
        logprobs = np.stack([of.logprobs for of in results])[:, known].astype(np.float64)
        lens, mass, promised = (
            None if of[0] is None else np.stack(of)[:, known]
            for of in zip(*(result[3:] for result in results), strict=True)
        )
        if promised is not None and len(stretch.slots) <= self.chains.most_requests:
            self.chains.observe(slots, shape, accepted, promised)
        if mass is not None:
            chances = self.confidence.observe_trees(logprobs, mass.astype(np.float64), accepted)
        else:
            chances = self.confidence.observe(logprobs, accepted, lens)
        self.requests.observe(slots, chances)

    def snapshot(self) -> dict[str, Any]:
        """For logs and gauges."""
        self._count()
        return {**self.metrics.snapshot(), "calibration": self.confidence.snapshot()}

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
