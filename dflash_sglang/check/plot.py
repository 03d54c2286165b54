"""The picture of a check: acceptance by position with its interval, beside the baseline's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the findings' curve to `path`, as PNG. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    shares = found["acceptance_at_position_1_on"]
    low, high = zip(*found["acceptance_at_position_1_on_intervals"], strict=True)
    positions = range(1, len(shares) + 1)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis = figure.subplots()
    axis.fill_between(positions, low, high, alpha=0.2, label="95 % over prompts")
    axis.plot(positions, shares, marker="D", label=f"{Path(found['draft']).name}: {found['accept_length']:.2f}")
    if baseline := found["baseline"]:
        of = baseline["positions"][: len(shares)]
        axis.plot(positions[: len(of)], of, "k--", label=f"baseline: {baseline['accept_length']:.2f}")
    axis.set(xlabel="proposal of the block", ylabel="steps that accepted it", ylim=(0, 1))
    axis.set_title(f"{found['verdict']}: target {Path(found['target']).name}", loc="left")
    axis.legend(title="accept length")
    axis.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=150)
