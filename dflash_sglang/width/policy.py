"""WidthPolicy: what the worker asks for the shape of the next step, and tells of those that came back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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


class WidthMetrics:
    """Counters since start-up, by kind, and the last decision's estimates (docs/reference/metrics.md)."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = list(kinds)
        self.steps = [0] * len(kinds)
        self.seconds = [0.0] * len(kinds)  # a step whose time was not measured counts with its estimate
        self.tokens = [0] * len(kinds)  # verified
        self.probes = [0] * len(kinds)
        self.changes, self.last_change = 0, "start"
        self.over_width_1 = self.over_block = 1.0
        self.left_out = 0  # steps without a result, and results without a step

    def chose(self, decision: Decision, requests: int) -> None:
        """A step of so many requests of this rank was decided."""
        kind = self._kinds.index(decision.kind)
        self.steps[kind] += 1
        self.tokens[kind] += decision.verify_budget or requests * (
            decision.tree_nodes or decision.chain or decision.width
        )
        self.probes[kind] += decision.probe
        if decision.reason not in ("hold", "probe", "copy"):
            self.changes += decision.reason != "start"
            self.last_change = decision.reason
        self.over_width_1, self.over_block = decision.over_width_1, decision.over_block

    def came_back(self, decision: Decision, seconds: float | None) -> None:
        """The result of a step is there; `seconds`: of the step, if they were measured."""
        self.seconds[self._kinds.index(decision.kind)] += decision.seconds if seconds is None else seconds

    def snapshot(self) -> dict[str, Any]:
        """For logs and gauges: sums by the width that was drafted, and steps by kind."""
        by_kind: dict[str, Sequence[float]] = {
            "steps": self.steps,
            "seconds": self.seconds,
            "verified_tokens": self.tokens,
            "probes": self.probes,
        }
        by_width: dict[str, dict[int, float]] = {name: {} for name in by_kind}
        for name, counts in by_kind.items():
            for kind, count in zip(self._kinds, counts, strict=True):
                by_width[name][kind.width] = by_width[name].get(kind.width, 0) + count
        return {
            **by_width,
            "shapes": dict(zip(map(str, self._kinds), self.steps, strict=True)),
            "changes": self.changes,
            "last_change": self.last_change,
            "estimated_over_width_1": self.over_width_1,
            "estimated_over_block": self.over_block,
            "left_out": self.left_out,
        }


class Step(NamedTuple):
    """A step that was chosen, for when its result is there."""

    number: int
    slots: np.ndarray  # [n] of its requests
    decision: Decision
    plan: Plan | None


class WidthPolicy:
    """One shape for every step of the whole batch.

    Serving: `prefill` for every prefill of any rank, `admit` when a request is prefilled, `choose` before each
    decode step, `verified` when its result is on the host. Overlap scheduling chooses a step or two ahead of what
    it was told. A result that comes back after its request's slot was given away is dropped.

    All ranks of a group make the same calls of `choose` in the same order. Rank 0 decides (`decider`), the others
    are told. Every rank estimates what its own requests accept. Nothing here reads a clock or draws.

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
        self._held = self.widths[0], 1.0  # width of the latest step that was no probe, and its share
        self._steps = 0

    def admit(
        self, slots: np.ndarray, max_widths: Sequence[int] | None = None, min_widths: Sequence[int] | None = None
    ) -> None:
        """New requests in these slots [n], with the `max_width` and the `min_width` of each."""
        self.requests.admit(slots, self._steps, max_widths, min_widths)
        self.chains.admit(slots)

    def prefill(self, tokens: int = 0) -> None:
        """The next decode step comes after a prefill of so many tokens, or of another rank's."""
        if self.decider is not None:
            self.decider.interruptions.prefill(tokens)

    def choose(
        self,
        slots: np.ndarray,
        context_tokens: int,
        ragged: bool = True,
        trees: bool = True,
        longest: int = 0,
    ) -> Step:
        """The shape of the next step for the requests in `slots` [n], whose contexts have `context_tokens`
        together.

        No slots: another rank has requests. `ragged`, `trees`: whether the step may be. `longest`: rows of the
        longest chain beyond the block that it may verify; 0: none."""
        slots = np.array(slots, np.intp)
        if self._fixed is not None:
            decision, plan = self._fixed, None
            known, few = self.requests, 0 < len(slots) <= self.most_trees
            if trees and few and known.cap(slots) == known.block and known.floor(slots) == PLAIN:
                decision = Decision(decision.width, tree_nodes=self.kinds[-1].nodes)
        else:
            decision, plan = self._decide(slots, context_tokens, ragged, trees, longest)
        self.metrics.chose(decision, len(slots))
        self._steps += 1
        return Step(self._steps - 1, slots, decision, plan)

    def _decide(
        self, slots: np.ndarray, context: int, ragged: bool, trees: bool, longest: int
    ) -> tuple[Decision, Plan | None]:
        """This rank's decision, or what the deciding rank tells; with the plan, on that rank."""
        group, decision, plan = self._group, Decision(self.widths[-1]), None
        if self.learns:
            n, known = len(slots), self.requests
            options = self._options.of(n)
            needed = known.steps_needed(slots, self._held, options.width, options.share)
            load = Load(n, n, float(context), known.cap(slots), known.floor(slots), needed)
            if group.gather is not None:
                load = Load.from_rows(group.gather(load.row()))
            if self.decider is not None:
                decision, plan = self.decider.decide(load, options, ragged, trees)
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
        step: Step,
        accepted: Sequence[int] | np.ndarray,
        seconds: float | None = None,
        logprobs: np.ndarray | None = None,
        lens: np.ndarray | None = None,
        mass: np.ndarray | None = None,
        promised: np.ndarray | None = None,
    ) -> None:
        """A step came back: `accepted` [n] proposals, and how long it took.

        logprobs [n, steps]: of the likeliest proposals; None where nothing was drafted. lens [n]: verified tokens
        of each request of a ragged step. mass [n, nodes]: of each node of a tree the log-probability, with those
        above it. promised [n]: of copies, see `Proposals`. `seconds`: from the end of the step before to the end
        of this one, so that the host's share and prefills in between count; None where the server had nothing to
        do in between.
        """
        n = len(step.slots)
        if len(accepted) != n:
            self.leave_out(f"{len(accepted)} results for step {step.number} of {n} requests")
            return
        prefilled = step.plan is not None and step.plan.prefilled is not None
        self.metrics.came_back(step.decision, None if prefilled else seconds)
        if self.decider is not None and step.plan is not None and seconds is not None:
            self.decider.observe(step.plan, seconds)
        if not self.learns or logprobs is None or not n or not logprobs.shape[1]:
            return
        known = np.flatnonzero(self.requests.are_in(step.slots, step.number))
        every = -(-len(known) // LEARNT_FROM) or 1
        known = known[step.number % every :: every]
        if not len(known):
            return
        logprobs, accepted = logprobs[known].astype(np.float64), np.asarray(accepted, np.int64)[known]
        if promised is not None and n <= self.chains.most_requests:
            self.chains.observe(step.slots[known], step.decision.shape, accepted, promised[known])
        if mass is not None:
            chances = self.confidence.observe_trees(logprobs, mass[known].astype(np.float64), accepted)
        else:
            chances = self.confidence.observe(logprobs, accepted, None if lens is None else lens[known])
        self.requests.observe(step.slots[known], chances)

    def snapshot(self) -> dict[str, Any]:
        """For logs and gauges."""
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
