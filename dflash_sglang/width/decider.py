"""The decision of one step: what the rank that decides knows, and how it decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN
from dflash_sglang.width.acceptance import Acceptance, Work, steps_needed
from dflash_sglang.width.choice import REASONS, Chooser
from dflash_sglang.width.interruptions import Interruptions
from dflash_sglang.width.ragged import Offer, RaggedSteps
from dflash_sglang.width.step_times import Sample, StepTimes


class Decision(NamedTuple):
    """One step's width, and what is expected of it; the same on all ranks.

    `verify_budget`: tokens that are verified of all requests together; None: `width` of each. `reason` as in
    `choice.Choice`. `seconds`: of the step. `share`: of the proposals that come true, those that are verified.
    The gains are committed tokens per second in the long run over those of plain decoding and of full blocks of
    the widest width.
    """

    width: int
    verify_budget: int | None = None
    reason: str = "hold"
    seconds: float = 0.0
    share: float = 1.0
    gain_over_plain: float = 1.0
    gain_over_full: float = 1.0

    @property
    def probe(self) -> bool:
        """Whether the width is tried for this step only."""
        return self.reason == "probe"

    def row(self) -> np.ndarray:
        """As numbers, for the other ranks."""
        return np.array([self.width, self.verify_budget or 0, REASONS.index(self.reason), *self[3:]], np.float64)

    @classmethod
    def from_row(cls, row: np.ndarray) -> Decision:
        width, budget, reason = map(int, row[:3])
        return cls(width, budget or None, REASONS[reason], *row[3:].tolist())


class Load(NamedTuple):
    """What the requests of all ranks ask of a step. Steps are padded to the largest `batch` of a rank."""

    requests: int
    batch: int
    context_tokens: float  # of the rank with most
    limit: int
    floor: int
    steps_needed: list[float]  # [widths] of one request, to commit what a step as it is held commits of all

    @classmethod
    def from_requests(cls, acceptance: Acceptance, slots: np.ndarray, context: int, work: Sequence[Work]) -> Load:
        """The load of one rank, whose requests in `slots` [n] bring this work."""
        n, needed = len(slots), steps_needed(work).tolist()
        return cls(n, n, float(context), acceptance.cap(slots), acceptance.floor(slots), needed)

    def row(self) -> np.ndarray:
        return np.array([*self[:-1], *self.steps_needed], np.float64)

    @classmethod
    def from_rows(cls, rows: np.ndarray) -> Load:
        """rows [ranks, n]"""
        total, (_, batch, context, limit, floor, *_) = rows.sum(axis=0).tolist(), rows.max(axis=0).tolist()
        return cls(int(total[0]), int(batch), context, int(limit), int(floor), total[5:])


class Plan(NamedTuple):
    """What the decider keeps of a step until its time is known."""

    bucket: int
    width: int  # an index
    context_tokens: float
    ragged: bool
    part: float  # of the time of full blocks


class Decider:
    """Weighs what every width commits against what it takes. Only rank 0 has one."""

    def __init__(self, acceptance: Acceptance, buckets: Sequence[int], budgets: Sequence[int] | None):
        self.widths = acceptance.widths
        self.step_times = StepTimes(buckets, self.widths)
        self.ragged = None if budgets is None else RaggedSteps(self.step_times, acceptance, budgets)
        self.interruptions = Interruptions()
        self._chooser = Chooser(self.widths)
        self._width = len(self.widths) - 1  # an index, of the latest decision that was no probe

    def fit(self, full: Iterable[Sample], ragged: Iterable[Sample]) -> None:
        """Start-up's steps of full blocks, of cells of `startup_cells`, and those with as few tokens as can be."""
        self.step_times.fit(full)
        if self.ragged is not None:
            self.ragged.times.fit(ragged)

    def decide(self, load: Load, work: list[Work], needs_full_blocks: bool) -> tuple[Decision, Plan | None]:
        """work: of this rank's requests; only ragged steps ask for it, which ranks with the same requests have."""
        if not load.requests:
            return Decision(self.widths[self._width]), None
        bucket = self.step_times.bucket(load.batch)
        full_seconds = self.step_times.seconds(bucket, load.context_tokens)
        offers = full = list(map(Offer, load.steps_needed, full_seconds))
        if self.ragged is not None and not needs_full_blocks and load.floor == PLAIN:
            offers = self.ragged.offers(work, load.requests, bucket, full, self._added)
        committed, seconds = self._long_run(load, offers)
        choice = self._chooser.choose(bucket, load.limit, load.floor, committed.tolist(), seconds.tolist())
        width, offer = choice.width, offers[choice.width]
        if choice.reason != "probe":
            self._width = width
            if self.ragged is not None and offer.verify_budget is not None:
                if self.ragged.times.compares(offer.seconds, full[width].seconds):
                    offer = full[width]
        rates = committed / seconds
        full_committed, full_taken = (committed, seconds) if offers is full else self._long_run(load, full)
        decision = Decision(
            self.widths[width],
            offer.verify_budget,
            choice.reason,
            offer.seconds,
            offers[width].share,
            float(rates[width] / rates[0]),
            float(rates[width] * full_taken[-1] / full_committed[-1]),
        )
        self.interruptions.step(float(committed[width]))
        ragged, part = offer.verify_budget is not None, offer.seconds / full_seconds[width]
        return decision, Plan(bucket, width, load.context_tokens, ragged, part)

    def observe(self, plan: Plan, seconds: float) -> None:
        """A step took so long."""
        error = self.step_times.observe(plan.bucket, plan.width, plan.context_tokens, seconds / plan.part)
        if self.ragged is not None:
            self.ragged.times.compare(plan.ragged, error)

    def _long_run(self, load: Load, offers: Sequence[Offer]) -> tuple[np.ndarray, np.ndarray]:
        """[widths] committed tokens and seconds of a step, the first in the long run, the second with what
        prefills add. Tokens are those that arrive over the steps that they need; a plain step commits one of a
        request, so the steps needed of width 1 say how many tokens arrive."""
        needed = np.array([offer.steps_needed for offer in offers])
        seconds = np.array([offer.seconds for offer in offers])
        committed = load.requests * needed[0] / needed
        return committed, seconds + self._added(committed)

    def _added(self, committed: np.ndarray) -> np.ndarray:
        """Seconds that prefills add to steps that commit so many tokens [...].

        What a prefill takes besides the time of its tokens is a pass over the target's weights: a plain step of
        one request without context."""
        return self.step_times.of_width(0, 0, 0.0) * self.interruptions.share(committed)
