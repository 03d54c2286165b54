"""The decision of the next steps, on the rank that decides: the kind with the most committed tokens per second in
the long run, hysteresis, and probes."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN
from dflash_sglang.verify.rows import Shape
from dflash_sglang.width.options import Kind, Options
from dflash_sglang.width.step_times import Interruptions, StepTimes

# By the simulation (docs/results/width-simulated.md, "The margin"): 0 to 5 % give 0.991 to 0.993 of the best.
MARGIN = 0.02  # that another kind must promise more than the held one
PROBE_BUDGET = 0.01  # share of the time that may be spent on steps of kinds that look worse
LEAST_COST = 0.03  # of a step, that a probe is charged at least
CAUTION = 4 / 3  # of the estimated cost that is charged: the kinds that get tried are those that were flattered
REASONS = ("start", "hold", "probe", "load", "gain", "limit", "copy")


class Decision(NamedTuple):
    """The kind of steps, and what is expected of each; the same on all ranks.

    `width`: of the draft's blocks. `verify_budget`: tokens that a ragged step verifies of all requests together,
    else None. `tree_nodes`: of each request's tree, else None. `chain`: rows of each request's chain where these
    are more than its block, else None. `reason` as in `Choice`. `seconds`: of the
    step. `share`: proposals that are accepted, over those of a chain of `width`. `over_...`: committed
    tokens per second in the long run over those of chains of width 1 and of the widest width, as estimated.
    """

    width: int
    verify_budget: int | None = None
    tree_nodes: int | None = None
    chain: int | None = None
    reason: str = "hold"
    seconds: float = 0.0
    share: float = 1.0
    over_width_1: float = 1.0
    over_block: float = 1.0

    @property
    def shape(self) -> Shape:
        return Shape(self.width, self.verify_budget, self.tree_nodes, self.chain)

    @property
    def probe(self) -> bool:
        """Whether the kind is tried for this step only."""
        return self.reason == "probe"

    @property
    def kind(self) -> Kind:
        return Kind(self.width, self.verify_budget is not None, self.tree_nodes, self.chain)

    def row(self) -> np.ndarray:
        """As numbers, for the other ranks."""
        width, budget, nodes, chain, reason, *rest = self
        return np.array([width, budget or 0, nodes or 0, chain or 0, REASONS.index(reason), *rest], np.float64)

    @classmethod
    def from_row(cls, row: np.ndarray) -> Decision:
        width, budget, nodes, chain, reason = map(int, row[:5])
        return cls(width, budget or None, nodes or None, chain or None, REASONS[reason], *row[5:].tolist())


class Load(NamedTuple):
    """What the requests of all ranks ask of a step. Steps are padded to the largest `batch` of a rank."""

    requests: int
    batch: int
    context_tokens: float  # of the rank with most
    limit: int
    floor: int
    steps_needed: np.ndarray  # [options] of one request, to commit what a step as it is held commits of all

    def row(self) -> np.ndarray:
        return np.array([*self[:-1], *self.steps_needed], np.float64)

    @classmethod
    def from_rows(cls, rows: np.ndarray) -> Load:
        """rows [ranks, n]"""
        total, (_, batch, context, limit, floor, *_) = rows.sum(axis=0), rows.max(axis=0).tolist()
        return cls(int(total[0]), int(batch), context, int(limit), int(floor), total[5:])


class Plan(NamedTuple):
    """What the decider keeps of steps until their time is known, as `StepTimes.observe` has it."""

    bucket: int
    kind: int  # an index
    context_tokens: float
    more: float


class Weighed(NamedTuple):
    """What a step of a kind is expected to commit; the seconds it takes, and after a step of another kind."""

    committed: float
    seconds: float
    switched: float


class Choice(NamedTuple):
    """`kind` is an index.

    `reason`: "start", "hold", "probe" (this kind for one step), "load" (another batch size), "gain" (more tokens
    per second promised) or "limit" (what the requests allow). A `Decision` may also have "copy" (`Chains`).
    """

    kind: int
    reason: str


class Chooser:
    """Chooses one kind per step; a deterministic function of its calls.

    The kind that is held is left at once when the padded batch size or the kinds that the requests allow change,
    and otherwise for one that promises `MARGIN` more.

    Of an abandoned kind little is learnt. So each of the other kinds earns an equal part of `PROBE_BUDGET` of
    the time. It is tried for one step when it has earned what that would cost: the time it takes beyond what the
    held kind would need for the same tokens, and that of the host for two changes of kind. What looks almost as
    good is tried often, what looks hopeless seldom. By these estimates all probes together cost `PROBE_BUDGET` of
    the time, whatever they turn out to give.
    """

    def __init__(self, kinds: int):
        self._held: int | None = None
        self._situation: tuple[int, tuple[int, ...]] | None = None
        self._earned = [0.0] * kinds

    def choose(
        self, bucket: int, allowed: Sequence[int], weighed: Mapping[int, Weighed], steps: int = 1
    ) -> Choice:
        """allowed: indices of one kind or more, the only ones of `weighed` that are looked at. steps: since the
        call before."""
        rates = {kind: weighed[kind].committed / weighed[kind].seconds for kind in allowed}
        best = max(allowed, key=rates.__getitem__)
        reason = self._reason((bucket, tuple(allowed)), best, rates)
        self._situation = (bucket, tuple(allowed))
        if reason != "hold" or self._held is None:
            self._held = best
            return Choice(best, reason)
        probe = self._probe(self._held, rates, weighed, steps)
        return Choice(self._held, reason) if probe is None else Choice(probe, "probe")

    def _reason(self, situation: tuple[int, tuple[int, ...]], best: int, rates: dict[int, float]) -> str:
        if self._held is None or self._situation is None:
            return "start"
        if best == self._held:
            return "hold"
        if self._held not in rates:
            return "limit"
        if situation != self._situation:
            return "load" if situation[0] != self._situation[0] else "limit"
        return "gain" if rates[best] > rates[self._held] * (1.0 + MARGIN) else "hold"

    def _probe(self, held: int, rates: dict[int, float], weighed: Mapping[int, Weighed], steps: int) -> int | None:
        """The kind to try in this step, if one has earned it."""
        if len(rates) == 1 or not PROBE_BUDGET:
            return None
        _, seconds, back = weighed[held]
        part = steps * PROBE_BUDGET * seconds / (len(rates) - 1)
        chosen, paid = None, 0.0
        for kind in rates:
            if kind == held:
                continue
            cost = CAUTION * (weighed[kind].switched - weighed[kind].committed / rates[held]) + back - seconds
            price = max(cost, LEAST_COST * seconds)
            self._earned[kind] = min(self._earned[kind] + part, price)  # waiting for its turn it saves no more
            if self._earned[kind] >= price and (chosen is None or rates[kind] > rates[chosen]):
                chosen, paid = kind, price
        if chosen is not None:
            self._earned[chosen] -= paid
        return chosen


class Decider:
    """Weighs what every kind commits against what it takes. Only rank 0 has one."""

    def __init__(self, kinds: Sequence[Kind], buckets: Sequence[int], trees: Mapping[int, int]):
        """kinds: `kinds_of`. trees: {nodes: most requests of a batch}."""
        self.kinds = list(kinds)
        self._widths = [kind.width for kind in kinds if kind == Kind(kind.width)]
        self._block = len(self._widths) - 1
        self._trees = trees
        self.step_times = StepTimes(buckets, kinds)
        self.interruptions = Interruptions()
        self._chooser = Chooser(len(kinds))
        self._width = self._widths[-1]  # of the latest decision that was no probe

    def decide(
        self, load: Load, options: Options, ragged: bool, trees: bool, steps: int, after_prefill: bool
    ) -> tuple[Decision, Plan | None]:
        """options: of so many requests. ragged, trees: whether the steps may be. steps: since the decision
        before."""
        if not load.requests:
            return Decision(self._width), None
        times, context = self.step_times, load.context_tokens
        bucket = times.bucket(load.batch)
        committed = load.requests * load.steps_needed[0] / load.steps_needed  # of [options], in the long run
        # What a ragged step's tokens add to it by the table.
        more = np.where(options.budget > 0, times.added(bucket, options.budget), 0.0)
        base, factors = times.seconds(bucket, context), times.factors(bucket)
        seconds = np.maximum(base[options.kind] + more * factors[options.kind], times.host()[options.kind])
        # A prefill takes a pass over the target's weights at least.
        prefills = times.of_kind(0, 0, 0.0) * self.interruptions.share(committed)
        spent = seconds + prefills
        switched = np.maximum(seconds, times.host(launches=2)[options.kind]) + prefills
        rates = committed / spent
        best = self._best(options, rates)
        rows = np.stack((committed, spent, switched), axis=1)[list(best.values())].tolist()
        weighed = {kind: Weighed(*row) for kind, row in zip(best, rows, strict=True)}
        allowed = [kind for kind in self._allowed(load, ragged, trees) if kind in best]
        choice = self._chooser.choose(bucket, allowed, weighed, steps)
        kind, at = self.kinds[choice.kind], best[choice.kind]
        if choice.reason != "probe":
            self._width = kind.width
        decision = Decision(
            kind.width,
            int(options.budget[at]) or None,
            kind.nodes,
            None,
            choice.reason,
            float(seconds[at]),
            float(options.share[at]),
            float(rates[at] / rates[0]),
            float(rates[at] / rates[self._block]),
        )
        self.interruptions.step(float(committed[at]), after_prefill, steps)
        return decision, Plan(bucket, choice.kind, context, float(more[at]))

    def _best(self, options: Options, rates: np.ndarray) -> dict[int, int]:
        """Of every kind that the batch could have, the option with the highest rate."""
        order = np.lexsort((rates, options.kind))  # by kind, then by rate
        return dict(zip(options.kind[options.last].tolist(), order[options.last].tolist(), strict=True))

    def _allowed(self, load: Load, ragged: bool, trees: bool) -> list[int]:
        """The kinds that the requests allow. If no chain lies between floor and limit, the widest one up to the
        limit is taken."""
        end = max(bisect.bisect_right(self._widths, load.limit), 1)
        first = min(bisect.bisect_left(self._widths, load.floor), end - 1)
        allowed = list(range(first, end))
        if load.floor > PLAIN:
            return allowed
        for index, kind in enumerate(self.kinds[self._block + 1 :], self._block + 1):
            may = ragged if kind.nodes is None else trees and load.batch <= self._trees[kind.nodes]
            if may and kind.width <= load.limit:
                allowed.append(index)
        return allowed
