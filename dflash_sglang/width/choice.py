"""The choice: the width with the most committed tokens per second in the long run, hysteresis, and probes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_sglang.settings.width import PLAIN

MOST = 0.5  # of the requests of a batch
MOST_IN_ADVANCE = 1.0  # steps, that a probe may cost before it is earned
LEAST_COST = 0.03  # of a step, that a probe is charged at least
CAUTION = 4 / 3  # of the estimated cost that is charged: the widths that get tried are those that were flattered


@dataclass(frozen=True)
class Choice:
    """`width` is an index. `incumbent`: the width that the policy holds, which a probe leaves for one step.

    `reason`: "start", "load" (another batch size), "gain" (more tokens per second promised), "limit" (what
    the requests allow), "hold" or "probe".
    """

    width: int
    incumbent: int
    reason: str

    @property
    def probe(self) -> bool:
        return self.width != self.incumbent


class Chooser:
    """Chooses one width per step; a deterministic function of its calls.

    The width that is held is left at once when the padded batch size or the widths that the requests allow change,
    and otherwise for one that promises `margin` more.

    Of an abandoned width nothing is learnt, and of plain decoding neither what drafting would give. So each of
    the other widths earns an equal part of `probe_budget` of the time, and is tried for one step when it has
    earned what it would cost: the time it takes beyond what the held width would need for the same tokens. What
    looks almost as good is tried often, what looks hopeless seldom, and all probes together cost
    `probe_budget` of the time by these estimates, whatever they turn out to give.

    While nothing is drafted nothing is learnt of new requests. If most of the batch was never drafted for, a probe
    that costs at most a step is made before it is earned; its width then earns it back before it is tried again.
    """

    def __init__(self, widths: Sequence[int], margin: float, probe_budget: float):
        self.widths = list(widths)
        self._margin, self._budget = margin, probe_budget
        self._held: int | None = None
        self._situation: tuple[int, range] | None = None
        self._earned = [0.0] * len(self.widths)

    @property
    def held(self) -> int:
        """Index of the width that is held; of plain decoding before the first choice."""
        return self._held or 0

    @property
    def plain(self) -> bool:
        """Whether plain decoding is held, so that `choose` looks at `unknown`."""
        return self._held is not None and self.widths[self._held] == PLAIN

    def choose(
        self,
        bucket: int,
        limit: int,
        committed: Sequence[float],
        seconds: Sequence[float],
        unknown: float = 0.0,
        floor: int = PLAIN,
    ) -> Choice:
        """`limit`: the largest width allowed; `floor`: the smallest, where one lies between the two, and else the
        largest is the only one; `committed`, `seconds`: expected of a step of every width, the first in the long
        run; `unknown`: share of the batch that was never drafted for."""
        end = max(bisect.bisect_right(self.widths, limit), 1)
        allowed = range(min(bisect.bisect_left(self.widths, floor), end - 1), end)
        rates = [committed[width] / seconds[width] for width in range(end)]
        best = max(allowed, key=rates.__getitem__)
        reason = self._reason((bucket, allowed), best, rates)
        if reason != "hold":
            self._held = best
        held = self._held
        assert held is not None
        self._situation = (bucket, allowed)
        if reason != "hold":
            return Choice(held, held, reason)
        probe = self._probe(held, allowed, rates, committed, seconds, in_advance=self.plain and unknown > MOST)
        return Choice(held, held, reason) if probe is None else Choice(probe, held, "probe")

    def _reason(self, situation: tuple[int, range], best: int, rates: list[float]) -> str:
        if self._held is None or self._situation is None:
            return "start"
        if best == self._held:
            return "hold"
        if self._held not in situation[1]:
            return "limit"
        if situation != self._situation:
            return "load" if situation[0] != self._situation[0] else "limit"
        return "gain" if rates[best] > rates[self._held] * (1.0 + self._margin) else "hold"

    def _probe(
        self,
        held: int,
        allowed: range,
        rates: list[float],
        committed: Sequence[float],
        seconds: Sequence[float],
        in_advance: bool,
    ) -> int | None:
        """The width to try in this step, if one has earned it."""
        if len(allowed) == 1 or not self._budget:
            return None
        part = self._budget * seconds[held] / (len(allowed) - 1)
        chosen, cost = None, 0.0
        for width in allowed:
            if width == held:
                continue
            price = max(CAUTION * (seconds[width] - committed[width] / rates[held]), LEAST_COST * seconds[held])
            self._earned[width] = min(self._earned[width] + part, price)  # waiting for its turn it saves no more
            due = 0.0 if in_advance and price <= MOST_IN_ADVANCE * seconds[held] else price
            if self._earned[width] >= due:
                if chosen is None or rates[width] > rates[chosen]:
                    chosen, cost = width, price
        if chosen is not None:
            self._earned[chosen] -= cost
        return chosen
