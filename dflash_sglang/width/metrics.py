"""What a width policy reports of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class WidthMetrics:
    """Counters since start-up, by width. Steps whose time was not measured count with the estimate of it.

    `gain_over_plain` and `gain_over_full` are estimates of the last choice: committed tokens per second of the
    chosen width, in the long run, over those of plain decoding and of the whole block. `left_out`: steps without
    a result, and results without a step.
    """

    widths: Sequence[int]
    steps: list[int] = field(init=False)
    seconds: list[float] = field(init=False)
    tokens: list[int] = field(init=False)  # verified
    probes: list[int] = field(init=False)
    changes: int = 0
    last_change: str = "start"
    gain_over_plain: float = 1.0
    gain_over_full: float = 1.0
    left_out: int = 0

    def __post_init__(self) -> None:
        self.steps = [0] * len(self.widths)
        self.seconds = [0.0] * len(self.widths)
        self.tokens = [0] * len(self.widths)
        self.probes = [0] * len(self.widths)

    def snapshot(self) -> dict[str, Any]:
        """For logs and gauges: steps, seconds, verified tokens, probes by width; the last change and its cause;
        what the estimates left out."""
        return {
            "steps": dict(zip(self.widths, self.steps, strict=True)),
            "seconds": dict(zip(self.widths, self.seconds, strict=True)),
            "verified_tokens": dict(zip(self.widths, self.tokens, strict=True)),
            "probes": dict(zip(self.widths, self.probes, strict=True)),
            "changes": self.changes,
            "last_change": self.last_change,
            "gain_over_plain": self.gain_over_plain,
            "gain_over_full": self.gain_over_full,
            "left_out": self.left_out,
        }
