"""The choice: the width with the most committed tokens per second in the long run, hysteresis, and probes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

# By the simulation (docs/results/width-simulated.md, "The margin"): 0 to 5 % give 0.991 to 0.993 of the best.
MARGIN = 0.02  # that another width must promise more than the held one
PROBE_BUDGET = 0.01  # share of the time that may be spent on steps at widths that look worse
LEAST_COST = 0.03  # of a step, that a probe is charged at least
CAUTION = 4 / 3  # of the estimated cost that is charged: the widths that get tried are those that were flattered


REASONS = ("start", "hold", "probe", "load", "gain", "limit")


class Choice(NamedTuple):
    """`width` is an index.

    `reason`: "start", "hold", "probe" (this width for one step), "load" (another batch size), "gain" (more tokens
    per second promised) or "limit" (what the requests allow).
    """

    width: int
    reason: str


class Chooser:
    """Chooses one width per step; a deterministic function of its calls.

    The width that is held is left at once when the padded batch size or the widths that the requests allow change,
    and otherwise for one that promises `MARGIN` more.

    Of an abandoned width nothing is learnt. So each of the other widths earns an equal part of `PROBE_BUDGET` of
    the time. It is tried for one step when it has earned what that would cost: the time it takes beyond what the
    held width would need for the same tokens. What looks almost as good is tried often, what looks hopeless
    seldom. By these estimates all probes together cost `PROBE_BUDGET` of the time, whatever they turn out to give.
    """

    def __init__(self, widths: Sequence[int]):
        self.widths = list(widths)
        self._held: int | None = None
        self._situation: tuple[int, range] | None = None
        self._earned = [0.0] * len(self.widths)

    def choose(
        self, bucket: int, limit: int, floor: int, committed: Sequence[float], seconds: Sequence[float]
    ) -> Choice:
        """`limit`: the largest width allowed; `floor`: the smallest. If no width lies between the two, the largest
        one up to `limit` is taken. `committed`, `seconds`: expected of a step of every width."""
        end = max(bisect.bisect_right(self.widths, limit), 1)
        allowed = range(min(bisect.bisect_left(self.widths, floor), end - 1), end)
        rates = [committed[width] / seconds[width] for width in range(end)]
        best = max(allowed, key=rates.__getitem__)
        reason = self._reason((bucket, allowed), best, rates)
        self._situation = (bucket, allowed)
        if reason != "hold" or self._held is None:
            self._held = best
            return Choice(best, reason)
        probe = self._probe(self._held, allowed, rates, committed, seconds)
        return Choice(self._held, reason) if probe is None else Choice(probe, "probe")

    def _reason(self, situation: tuple[int, range], best: int, rates: list[float]) -> str:
        if self._held is None or self._situation is None:
            return "start"
        if best == self._held:
            return "hold"
        if self._held not in situation[1]:
            return "limit"
        if situation != self._situation:
            return "load" if situation[0] != self._situation[0] else "limit"
        return "gain" if rates[best] > rates[self._held] * (1.0 + MARGIN) else "hold"

    def _probe(
        self, held: int, allowed: range, rates: list[float], committed: Sequence[float], seconds: Sequence[float]
    ) -> int | None:
        """The width to try in this step, if one has earned it."""
        if len(allowed) == 1 or not PROBE_BUDGET:
            return None
        part = PROBE_BUDGET * seconds[held] / (len(allowed) - 1)
        chosen, cost = None, 0.0
        for width in allowed:
            if width == held:
                continue
            price = max(CAUTION * (seconds[width] - committed[width] / rates[held]), LEAST_COST * seconds[held])
            self._earned[width] = min(self._earned[width] + part, price)  # waiting for its turn it saves no more
            if self._earned[width] >= price and (chosen is None or rates[width] > rates[chosen]):
                chosen, cost = width, price
        if chosen is not None:
            self._earned[chosen] -= cost
        return chosen
