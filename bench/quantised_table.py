"""The table of docs/results/quantised-drafts.md, in Markdown, from a report of bench.quantised.

python -m bench.quantised_table FILE
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dflash_sglang.bench.script import script_parser

HEAD = """\
| scheme | context KV | accept length over bf16 | launches per layer | step time over bf16 |
|---|---|---|---|---|"""
UNKNOWN = "not measured"


def launches_per_layer(counted: Mapping[str, Any]) -> float:
    """Launches of the projection, over the draft's layers; not those that all layers share: the write, and the
    norm of the context rows where it is among the counted ones."""
    shared = [name for name in counted["kernels"] if "rmsnorm" in name.lower() or "write" in name]
    return (len(counted["kernels"]) - len(shared)) / counted["layers"]


def rows(report: Mapping[str, Any]) -> Iterator[str]:
    """A row for each scheme of the report, in its order: those measured, counted or not served."""
    figures, launches, failed = report["figures"], report["launches"], report["failed"]
    for scheme in dict.fromkeys([*launches, *figures, *failed]):
        measured, counted = figures.get(scheme, {}), launches.get(scheme, {})
        form = (measured.get("context_kv") or counted.get("context_kv") or UNKNOWN).partition(" (")[0]
        ratios = [_number(measured, name) for name in ("accept_length_over_bf16", "step_time_over_bf16")]
        if scheme in failed:
            ratios = ["not served"] * 2
        elif scheme == "bf16":
            ratios = ["1"] * 2
        count = f"{launches_per_layer(counted):.2f}" if "kernels" in counted else UNKNOWN
        yield f"| {scheme} | {form} | {ratios[0]} | {count} | {ratios[1]} |"


def _number(measured: Mapping[str, Any], name: str) -> str:
    return f"{measured[name]:.3f}" if name in measured else UNKNOWN


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("report", type=Path, metavar="FILE")
    print(HEAD, *rows(json.loads(parser.parse_args().report.read_text())), sep="\n")


if __name__ == "__main__":
    main()
