"""SmolLM2 and its packaged draft on real prompts: by default, with whole blocks alone, the built-in worker, plain.

python -m bench.real_pair --out FILE --prompts gsm8k.jsonl humaneval.jsonl mtbench.jsonl
                          [the options of `dflash-sglang bench`]

As `dflash-sglang bench` measures, with one server of ours more, whose steps all have the draft's block. Claims are
of its accept lengths, with the most requests at a time, which ask the most prompts; and of the default's tokens/s
over no speculation, by set of prompts, and over the built-in worker, with the worst of them. What is measured when
SIGTERM ends the run is kept.
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
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.signals import signals_as_exit

ACCEPTED = {"gsm8k": 4.0, "humaneval": 3.2, "mtbench": 2.6}  # tokens a step wanted, by set
# Ratios of tokens per second that are wanted, by requests at a time.
OVER_PLAIN = {"gsm8k": {1: 3.0, 8: 1.7, 32: 1.25, 64: 1.1}, "mtbench": {1: 1.8, 8: 1.15, 32: 1.0, 64: 0.97}}
OVER_BUILT_IN = {1: 1.5, 8: 1.2, 32: 1.15, 64: 1.15}
KEPT = "settings", "sets", "servers", "skipped", "acceptance", "outputs", "incomplete"  # of a `document`


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
    """Of what there is of `document`'s figures."""
    medians = {(_set(one), one["concurrency"], one["server"]): one["median"] for one in figures}
    most = max((requests for _, requests, _ in medians), default=0)
    out = []
    for name, wanted in ACCEPTED.items():
        if (median := medians.get((name, most, str(Served(OURS, block))))) is not None:
            what = f"accept length, blocks of {block}, {most} requests, {name}"
            out.append(report.at_least(what, round(median["accept_length"], 3), wanted))

    def over(other: Served, requests: int, name: str) -> float | None:
        """The default's tokens per second over another server's."""
        pair = [medians.get((name, requests, str(served))) for served in (Served(OURS), other)]
        rates = [median["output_tokens_per_second"] for median in pair if median is not None]
        return round(rates[0] / rates[1], 3) if len(rates) == 2 else None

    for name, bounds in OVER_PLAIN.items():
        for requests, bound in bounds.items():
            if (ratio := over(Served(PLAIN), requests, name)) is not None:
                out.append(report.at_least(f"over no speculation, {requests} requests, {name}", ratio, bound))
    for requests, bound in OVER_BUILT_IN.items():
        found = {name: over(Served(BUILT_IN, block), requests, name) for name in ACCEPTED}
        ratios = {name: ratio for name, ratio in found.items() if ratio is not None}
        if ratios:
            worst = min(ratios, key=ratios.__getitem__)
            what = f"over the built-in worker, {requests} requests, the worst of {len(ratios)} sets, {worst}"
            out.append(report.at_least(what, ratios[worst], bound))
    return out


def _set(one: dict[str, Any]) -> str:
    return Path(one["prompts"]).stem.replace("-", "")


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    own, others = parser.parse_known_args()
    incomplete = None
    with tempfile.TemporaryDirectory() as scratch, signals_as_exit():
        asked = settings(others, Path(scratch))
        results = {served: sweep.Measured(served) for served in asked.served}
        try:
            sweep.measure(asked, results, Progress(sys.stdout))
        except SystemExit as ended:
            incomplete = f"ended by {ended.code}"
        found = document(asked, list(results.values()), [], {}, incomplete)
    kept = {name: found[name] for name in KEPT}
    found_claims = claims(found["figures"], max(asked.widths))
    return report.finish("bench.real_pair", own.out, found_claims, figures=found["figures"], **kept)


if __name__ == "__main__":
    sys.exit(main())
