"""The choice: the kind with the most committed tokens per second in the long run, hysteresis, and probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# By the simulation (docs/results/width-simulated.md, "The margin"): 0 to 5 % give 0.991 to 0.993 of the best.
MARGIN = 0.02  # that another kind must promise more than the held one
PROBE_BUDGET = 0.01  # share of the time that may be spent on steps of kinds that look worse
LEAST_COST = 0.03  # of a step, that a probe is charged at least
CAUTION = 4 / 3  # of the estimated cost that is charged: the kinds that get tried are those that were flattered


REASONS = ("start", "hold", "probe", "load", "gain", "limit", "copy")


class Choice(NamedTuple):
    """`kind` is an index.

    `reason`: "start", "hold", "probe" (this kind for one step), "load" (another batch size), "gain" (more tokens
    per second promised) or "limit" (what the requests allow). A `Decision` may also have "copy" (`chains.Chains`).
    """

    kind: int
    reason: str


class Chooser:
    """Chooses one kind per step; a deterministic function of its calls.

    The kind that is held is left at once when the padded batch size or the kinds that the requests allow change,
    and otherwise for one that promises `MARGIN` more.

    Of an abandoned kind little is learnt. So each of the other kinds earns an equal part of `PROBE_BUDGET` of
    the time. It is tried for one step when it has earned what that would cost: the time it takes beyond what the
    held kind would need for the same tokens. What looks almost as good is tried often, what looks hopeless
    seldom. By these estimates all probes together cost `PROBE_BUDGET` of the time, whatever they turn out to give.
    """

    def __init__(self, kinds: int):
        self._held: int | None = None
        self._situation: tuple[int, tuple[int, ...]] | None = None
        self._earned = [0.0] * kinds

    def choose(
        self, bucket: int, allowed: Sequence[int], committed: Mapping[int, float], seconds: Mapping[int, float]
    ) -> Choice:
        """allowed: indices of one kind or more, the only ones looked at of `committed` and `seconds`, which a
        step of every kind is expected to commit and to take."""
        rates = {kind: committed[kind] / seconds[kind] for kind in allowed}
        best = max(allowed, key=rates.__getitem__)
        reason = self._reason((bucket, tuple(allowed)), best, rates)
        self._situation = (bucket, tuple(allowed))
        if reason != "hold" or self._held is None:
            self._held = best
            return Choice(best, reason)
        probe = self._probe(self._held, rates, committed, seconds)
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

    def _probe(
        self, held: int, rates: dict[int, float], committed: Mapping[int, float], seconds: Mapping[int, float]
    ) -> int | None:
        """The kind to try in this step, if one has earned it."""
        if len(rates) == 1 or not PROBE_BUDGET:
            return None
        part = PROBE_BUDGET * seconds[held] / (len(rates) - 1)
        chosen, cost = None, 0.0
        for kind in rates:
            if kind == held:
                continue
            price = max(CAUTION * (seconds[kind] - committed[kind] / rates[held]), LEAST_COST * seconds[held])
            self._earned[kind] = min(self._earned[kind] + part, price)  # waiting for its turn it saves no more
            if self._earned[kind] >= price and (chosen is None or rates[kind] > rates[chosen]):
                chosen, cost = kind, price
        if chosen is not None:
            self._earned[chosen] -= cost
        return chosen
