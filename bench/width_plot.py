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


def lines_of(figures: Mapping[str, Any], fixed: Sequence[int]) -> list[dict[str, Any]]:
    """Medians as `plot.draw` takes them. figures: {concurrency: {name: {figure: [one value per round]}}}"""
    named = {
        OURS: ("this package", OURS),
        BUILT_IN: ("built-in worker", BUILT_IN),
        PLAIN: ("no speculation", PLAIN),
    }
    named |= {f"{OURS}_{width}": (f"fixed width {width}", FIXED) for width in fixed}
    lines: list[dict[str, Any]] = []
    for name, (server, kind) in named.items():
        for at in sorted((int(at) for at, measured in figures.items() if name in measured)):
            rate = statistics.median(figures[str(at)][name]["tokens_per_second"])
            median = dict(output_tokens_per_second=rate, user_tokens_per_second=rate / at)
            lines.append(dict(server=server, kind=kind, concurrency=at, median=median))
    return lines


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
        panels[title] = lines_of(figures, arguments.fixed)
    plot.draw(panels, arguments.png, arguments.subject)


if __name__ == "__main__":
    main()
