"""The decision of one step: what the rank that decides knows, and how it decides."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN
from dflash_sglang.verify.rows import Shape
from dflash_sglang.width.choice import REASONS, Chooser
from dflash_sglang.width.interruptions import Interruptions
from dflash_sglang.width.kinds import Kind
from dflash_sglang.width.options import Options
from dflash_sglang.width.step_times import Sample, StepTimes


class Decision(NamedTuple):
    """One step's kind, and what is expected of it; the same on all ranks.

    `width`: of the draft's blocks. `verify_budget`: tokens that a ragged step verifies of all requests together,
    else None. `tree_nodes`: of each request's tree, else None. `chain`: rows of each request's chain where these
    are more than its block, else None. `reason` as in `choice.Choice`. `seconds`: of the
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
    """What the decider keeps of a step until its time is known."""

    bucket: int
    kind: int  # an index
    context_tokens: float
    more: float  # seconds by the table that a ragged step's tokens add
    prefilled: int | None  # tokens that were prefilled before it; None: nothing was


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

    def fit(self, samples: Iterable[Sample]) -> None:
        """Start-up's steps."""
        self.step_times.fit(samples)

    def decide(self, load: Load, options: Options, ragged: bool, trees: bool) -> tuple[Decision, Plan | None]:
        """options: of so many requests. ragged, trees: whether the step may be."""
        if not load.requests:
            return Decision(self._width), None
        times, context = self.step_times, load.context_tokens
        bucket = times.bucket(load.batch)
        committed = load.requests * load.steps_needed[0] / load.steps_needed  # of [options], in the long run
        seconds, more = self._seconds(bucket, context, options)
        added = times.of_kind(0, 0, 0.0)
        spent = seconds + self.interruptions.once(added) * self.interruptions.share(committed)
        rates = committed / spent
        best = self._best(options, rates)
        of_best = list(best.values())
        choice = self._chooser.choose(
            bucket,
            [kind for kind in self._allowed(load, ragged, trees) if kind in best],
            *(dict(zip(best, of[of_best].tolist(), strict=True)) for of in (committed, spent)),
        )
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
        prefilled = self.interruptions.step(float(committed[at]))
        return decision, Plan(bucket, choice.kind, context, float(more[at]), prefilled)

    def _seconds(self, bucket: int, context: float, options: Options) -> tuple[np.ndarray, np.ndarray]:
        """[options] seconds of a step, and what a ragged one's tokens add to them by the table."""
        times = self.step_times
        more = np.where(options.budget > 0, times.added(bucket, options.budget), 0.0)
        base, factors = times.seconds(bucket, context), times.factors(bucket)
        return base[options.kind] + more * factors[options.kind], more

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

    def observe(self, plan: Plan, seconds: float) -> None:
        """A step took so long, with what was prefilled before it."""
        times, (bucket, kind, context, more, prefilled) = self.step_times, plan
        if prefilled is None:
            times.observe(bucket, kind, context, seconds, more)
        else:
            added = seconds - times.of_kind(bucket, kind, context, more)
            self.interruptions.observe(prefilled, added, times.of_kind(0, 0, 0.0))
