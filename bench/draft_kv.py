"""How many tokens fit beside a draft whose KV is in rings, and beside one whose KV is a pool like the target's.

python -m bench.draft_kv --target DIR --draft DIR --out FILE [--requests 48]

Every layer of the draft has to slide. Both servers have the memory settings that SGLang chooses, and only start,
one after the other. Random weights do, with few flags: `bench/figures.sh GPU drafts_kv`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import report
from bench.running_requests import start
from bench.servers import add_model_options
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS
from dflash_sglang.demo.signals import signals_as_exit

RINGS, WHOLE = "auto", "whole"  # of the setting `draft_kv`
MORE = 1.17  # times as many tokens with rings, at least


def claims(figures: Mapping[str, Mapping[str, Any]], requests: int) -> list[dict[str, Any]]:
    rings, whole = (figures[draft_kv]["memory_usage"]["token_capacity"] for draft_kv in (RINGS, WHOLE))
    what = f"tokens that fit with rings over those with a whole pool, {rings} over {whole}, {requests} requests"
    return [report.at_least(what, round(rings / whole, 4), MORE)]


def main() -> int:
    parser = script_parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--requests", type=int, default=48, help="that may run at a time")
    arguments = parser.parse_args()
    arguments.flags += ["--max-running-requests", str(arguments.requests)]
    figures: dict[str, Any] = {}
    with signals_as_exit(), tempfile.TemporaryDirectory() as scratch:
        for draft_kv in (WHOLE, RINGS):
            figures[draft_kv] = start(OURS, arguments, Path(scratch), f"ours_{draft_kv}", draft_kv=draft_kv)
            print(draft_kv, figures[draft_kv], flush=True)
    found = claims(figures, arguments.requests)
    return report.finish("bench.draft_kv", arguments.out, found, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
