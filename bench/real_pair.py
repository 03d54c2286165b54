"""SmolLM2 and its packaged draft on real prompts: by default, with whole blocks alone, the built-in worker, plain.

python -m bench.real_pair --out FILE --prompts gsm8k.jsonl humaneval.jsonl mtbench.jsonl
                          [the options of `dflash-sglang bench`]

As `dflash-sglang bench` measures, with one server of ours more, whose steps all have the draft's block. Claims are
of its accept lengths (`WANTED`), where these sets are among the prompts, with the most requests at a time: these
ask the most prompts.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import report
from dflash_sglang.bench import arguments, sweep
from dflash_sglang.bench.document import document
from dflash_sglang.bench.script import script_parser
from dflash_sglang.bench.settings import Served, Settings
from dflash_sglang.demo.launch import OURS
from dflash_sglang.demo.progress import Progress

WANTED = {"gsm8k": 4.0, "humaneval": 3.2, "mtbench": 2.6}  # by set


class WithBlocks(Settings):
    """The same, with a server of ours whose steps all have the draft's block."""

    @property
    def served(self) -> list[Served]:
        return list(dict.fromkeys([*super().served, *(Served(OURS, width) for width in self.widths)]))


def settings(argv: Sequence[str], out: Path) -> Settings:
    """Those of `dflash-sglang bench --chat` with these options. Raises BadSetting."""
    parser = script_parser(__doc__)
    arguments.add_parser(parser.add_subparsers())
    options = parser.parse_args(["bench", "--chat", "--out", str(out), *argv])
    of = arguments.settings_of(options, torch.cuda.is_available())
    return WithBlocks(**{field.name: getattr(of, field.name) for field in dataclasses.fields(of)})


def claims(figures: Sequence[dict[str, Any]], block: int) -> list[dict[str, Any]]:
    """Of accept lengths."""
    out, most = [], max(one["concurrency"] for one in figures)
    for one in figures:
        name = Path(one["prompts"]).stem.replace("-", "")
        if one["server"] == str(Served(OURS, block)) and one["concurrency"] == most and name in WANTED:
            length = round(one["median"]["accept_length"], 3)
            what = f"accept length, blocks of {block}, {most} requests, {name}"
            out.append(report.at_least(what, length, WANTED[name]))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    own, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        asked = settings(others, Path(scratch))
        results = {served: sweep.Measured(served) for served in asked.served}
        sweep.measure(asked, results, Progress(sys.stdout))
        found = document(asked, list(results.values()), [], {}, None)
    kept = {name: found[name] for name in ("settings", "sets", "servers", "skipped", "acceptance", "outputs")}
    found_claims = claims(found["figures"], max(asked.widths))
    return report.finish("bench.real_pair", own.out, found_claims, figures=found["figures"], **kept)


if __name__ == "__main__":
    sys.exit(main())
