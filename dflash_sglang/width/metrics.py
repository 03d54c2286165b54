"""What a width policy reports of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_sglang.width.decider import Decision
from dflash_sglang.width.kinds import Kind


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
        counts: dict[str, Sequence[float]] = {
            "steps": self.steps,
            "seconds": self.seconds,
            "verified_tokens": self.tokens,
            "probes": self.probes,
        }
        return {
            **{name: self._by_width(of) for name, of in counts.items()},
            "shapes": {str(kind): steps for kind, steps in zip(self._kinds, self.steps, strict=True)},
            "changes": self.changes,
            "last_change": self.last_change,
            "estimated_over_width_1": self.over_width_1,
            "estimated_over_block": self.over_block,
            "left_out": self.left_out,
        }

    def _by_width(self, counts: Sequence[float]) -> dict[int, float]:
        widths = dict.fromkeys((kind.width for kind in self._kinds), type(counts[0])())
        for kind, count in zip(self._kinds, counts, strict=True):
            widths[kind.width] += count
        return widths
