"""What a width policy reports of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_sglang.width.decider import Decision


class WidthMetrics:
    """Counters since start-up, by width, and the last decision's estimates (docs/reference/metrics.md)."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = list(widths)
        self.steps = [0] * len(widths)
        self.seconds = [0.0] * len(widths)  # a step whose time was not measured counts with its estimate
        self.tokens = [0] * len(widths)  # verified
        self.probes = [0] * len(widths)
        self.changes, self.last_change = 0, "start"
        self.gain_over_plain = self.gain_over_full = 1.0
        self.left_out = 0  # steps without a result, and results without a step

    def chose(self, decision: Decision, requests: int) -> None:
        """A step of so many requests of this rank was decided."""
        width, budget = self._widths.index(decision.width), decision.verify_budget
        self.steps[width] += 1
        self.tokens[width] += requests * decision.width if budget is None else budget
        self.probes[width] += decision.probe
        if decision.reason not in ("hold", "probe"):
            self.changes += decision.reason != "start"
            self.last_change = decision.reason
        self.gain_over_plain, self.gain_over_full = decision.gain_over_plain, decision.gain_over_full

    def came_back(self, decision: Decision, seconds: float | None) -> None:
        """The result of a step is there; `seconds`: of the step, if they were measured."""
        self.seconds[self._widths.index(decision.width)] += decision.seconds if seconds is None else seconds

    def gains(self) -> tuple[float, float]:
        """Estimated tokens per second of the last choice over those of plain decoding and of whole blocks."""
        return self.gain_over_plain, self.gain_over_full

    def snapshot(self) -> dict[str, Any]:
        """For logs and gauges."""
        by_width: dict[str, Sequence[float]] = {
            "steps": self.steps,
            "seconds": self.seconds,
            "verified_tokens": self.tokens,
            "probes": self.probes,
        }
        return {
            **{name: dict(zip(self._widths, counts, strict=True)) for name, counts in by_width.items()},
            "changes": self.changes,
            "last_change": self.last_change,
            "gain_over_plain": self.gain_over_plain,
            "gain_over_full": self.gain_over_full,
            "left_out": self.left_out,
        }
