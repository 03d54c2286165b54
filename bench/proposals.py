"""What to propose to sampled requests: the argmax of the draft, or tokens drawn from its distribution.

python -m bench.proposals --out FILE [--flags "..."]

Serves the pair with each kind of proposals and sends the held-out prompts one by one, sampled; three rounds, by
turns. The better kind is the default of DFLASH_SGLANG_CONFIG's `proposals`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from bench import report
from bench.pair import decode, pair_server, prompts_of_pair
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, wait_for
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig, ProposalKind

NEW_TOKENS = 128
SAMPLING: dict[str, dict[str, float]] = {
    "temperature 0.7": dict(temperature=0.7),
    "temperature 1.0": dict(temperature=1.0),
}
FIGURES = ("new_tokens_after_the_first_per_step", "tokens_per_second")


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of every server, one string")
    arguments = parser.parse_args()
    prompts = prompts_of_pair()
    kinds = tuple(kind for kind in get_args(ProposalKind) if kind != "auto")
    figures: dict[str, Any] = {name: {kind: {f: [] for f in FIGURES} for kind in kinds} for name in SAMPLING}
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        servers = {}
        for kind in kinds:
            environment = {CONFIG_ENV: json.dumps({"proposals": kind, "width": "block"})}
            server = pair_server(OURS, Path(scratch) / f"{kind}.log", arguments.flags, environment)
            servers[kind] = stack.enter_context(server)
        for server in servers.values():
            wait_for(OURS, server)
        for name, sampling in SAMPLING.items():
            for server in servers.values():
                decode(server, prompts[:4], NEW_TOKENS, **sampling)
            for _ in range(arguments.rounds):
                for kind, server in servers.items():
                    result = decode(server, prompts, NEW_TOKENS, **sampling)
                    for figure in FIGURES:
                        figures[name][kind][figure].append(round(result[figure], 3))
            print(name, json.dumps(figures[name]), flush=True)
    default = "drawn" if PluginConfig().draws(joint=False) else "argmax"  # the pair's draft is a plain one
    claims = []
    for name in SAMPLING:
        speed = {kind: statistics.median(figures[name][kind]["tokens_per_second"]) for kind in kinds}
        what = f"tokens per second of the default proposals ({default}) over the best kind's, {name}"
        claims.append(report.at_least(what, round(speed[default] / max(speed.values()), 3), 1.0))
    return report.finish(
        "bench.proposals", arguments.out, claims, figures=figures, prompts=len(prompts), new_tokens=NEW_TOKENS
    )


if __name__ == "__main__":
    sys.exit(main())
