"""How many requests run at a time beside their recurrent states: this package's worker and the built-in one.

python -m bench.running_requests --target DIR --draft DIR --out FILE

Both servers have the memory settings that SGLang chooses, and only start, one after the other. Random weights do:
`python -m dflash_sglang.bench.random_pair DIR --shape hybrid-27b --config-only`, and the servers' flags
`"--flags=--load-format dummy" "--dflash-flags=--speculative-draft-load-format auto"`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import report
from bench.servers import add_model_options, parse
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import BUILT_IN, ON_CPU, OURS, environment, model_flags, new_server, wait_for
from dflash_sglang.demo.signals import signals_as_exit
from dflash_sglang.settings.plugin_config import CONFIG_ENV

MORE = 3.0  # times as many as with the built-in worker, at least


def start(
    kind: str, arguments: argparse.Namespace, scratch: Path, name: str | None = None, **settings: Any
) -> dict[str, Any]:
    """What a server that then ends has room for. name: of its log, the kind by default; settings: of ours."""
    cpu = arguments.device == "cpu"
    flags = [
        *model_flags(kind, arguments.target, arguments.draft, arguments.dflash_flags),
        "--skip-tokenizer-init",
    ]
    log = (arguments.logs or scratch) / f"{name or kind}.log"
    variables = environment(kind, cpu=cpu, chooses=True) | ({CONFIG_ENV: json.dumps(settings)} if settings else {})
    flags += [*arguments.flags, *(ON_CPU if cpu else ())]
    with new_server(flags, environment=variables, log=log) as server:
        wait_for(kind, server)
        [state] = server.get("/server_info")["internal_states"]
    running = state["effective_max_running_requests_per_dp"]
    return {"running_requests": running, "memory_usage": state["memory_usage"]}


def claims(figures: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not {OURS, BUILT_IN} <= set(figures):
        return []
    ours, built_in = (figures[kind]["running_requests"] for kind in (OURS, BUILT_IN))
    what = f"running requests over the built-in worker's, {ours} over {built_in}"
    return [report.at_least(what, round(ours / built_in, 4), MORE)]


def main() -> int:
    parser = script_parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--kinds", nargs="+", choices=[BUILT_IN, OURS], default=[BUILT_IN, OURS])
    arguments = parse(parser)
    figures: dict[str, Any] = {}
    status = 1
    with signals_as_exit(), tempfile.TemporaryDirectory() as scratch:
        for kind in arguments.kinds:
            figures[kind] = start(kind, arguments, Path(scratch))
            print(kind, figures[kind], flush=True)
            status = report.finish("bench.running_requests", arguments.out, claims(figures), figures=figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
