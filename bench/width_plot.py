"""Draws figures of `bench.widths`: throughput against concurrency, and the speed of one user against throughput.

python -m bench.width_plot PNG --panel TITLE FILE... [--panel TITLE FILE...] [--fixed 4]

Beside our policy, no speculation and the built-in worker it has the fixed widths that are asked for.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench import plot
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN

FIXED = "fixed"


def panels_of(
    figures: Mapping[str, Any], fixed: Sequence[int], title: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """`plot.Panels` of the medians. figures: {concurrency: {name: {figure: [one value per round]}}}"""
    named = {
        OURS: ("this package", OURS),
        BUILT_IN: ("built-in worker", BUILT_IN),
        PLAIN: ("no speculation", PLAIN),
    }
    named |= {f"{OURS}_{width}": (f"fixed width {width}", FIXED) for width in fixed}
    lines: dict[str, dict[str, Any]] = {}
    for name, (label, kind) in named.items():
        points = [(int(at), measured[name]) for at, measured in figures.items() if name in measured]
        points.sort(key=lambda point: point[0])
        if points:
            lines[label] = dict(
                kind=kind,
                concurrency=[at for at, _ in points],
                tokens_per_second=[statistics.median(of["tokens_per_second"]) for _, of in points],
                user_tokens_per_second=[statistics.median(of["tokens_per_second"]) / at for at, of in points],
            )
    return {title: lines}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("png", type=Path)
    parser.add_argument(
        "--panel", nargs="+", action="append", required=True, metavar=("TITLE", "FILE"),
        help="results of different concurrencies",
    )  # fmt: skip
    parser.add_argument("--fixed", type=int, nargs="*", default=[4], help="widths")
    parser.add_argument("--subject", default="Qwen3-8B shapes, one H200")
    arguments = parser.parse_args()
    panels: dict[str, Any] = {}
    for title, *files in arguments.panel:
        figures: dict[str, Any] = {}
        for file in files:
            figures |= json.loads(Path(file).read_text())["figures"]
        panels |= panels_of(figures, arguments.fixed, title)
    plot.draw(panels, arguments.png, arguments.subject)


if __name__ == "__main__":
    main()
