"""Start-up and tokens per second of this checkout of the package and of another one, in turn on one GPU.

python -m bench.paired --before DIR --target DIR --draft DIR --out FILE [--concurrency 1 8 32 64 128] [--rounds 3]
                       [--seconds 6] [--starts 2] [--kept 0.99] [--width 8] [--requests 128] [--held-out]
                       [--no-trees]

`--before`: the other checkout, a directory that holds `dflash_sglang`. Each checkout starts `--starts` times, with
no other server there, after one start that is not counted. Then one server of each is up, and both have every load
in turn. Acceptance is forced by position, and each server chooses its widths, or has the one of `--width`: two
servers of one checkout choose alike only in the long run. Without a `--concurrency`, starts alone are measured.

Tokens per second come from the steps that a server counts in a steady load: each step of a width commits what the
coins give at that width in the long run. So few coins of a short load add no noise.

`--held-out`: prompts are those that the packaged pair was not trained on, as bytes; the draft's proposals are
accepted as they deserve, and tokens are those that clients get.

`--no-trees`: one more server of this checkout, whose steps are chains, has the loads, too. Nothing is claimed
of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.load import Load, OfTexts
from bench.servers import Candidate, add_options, parse, server_of, together
from bench.steady import RAMP, SPREAD, WARM_UP, clients, occupy, watch
from bench.widths import ACCEPTANCE, BLOCK, mean_length, since, told
from dflash_sglang.bench.load import rotated
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, wait_for
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit
from dflash_sglang.settings.plugin_config import CONFIG_ENV, FORCED_ENV
from training.pair import held_out_prompts

BEFORE, AFTER, NO_TREES = "before", "after", "no_trees"
ROOT = Path(__file__).parents[1]
START_UP = 1.0  # of the time from launch to ready, at most


def candidates(
    before: Path, python_path: str, width: int | None = None, forced: bool = True, no_trees: bool = False
) -> list[Candidate]:
    """One server of each checkout, whose package comes first on its path. width: of every step; None: chosen.
    forced: acceptance. no_trees: one more of this checkout.

    PYTHONSAFEPATH: else `python -m` puts the working directory, which has a package too, before PYTHONPATH.
    """
    settings: dict[str, Any] = {"width": {} if width is None else width}
    acceptance = {FORCED_ENV: json.dumps(ACCEPTANCE["good"])} if forced else {}
    if forced:
        settings["copy"] = "off"
    servers = [(BEFORE, before.resolve(), settings), (AFTER, ROOT, settings)]
    if no_trees:
        servers.append((NO_TREES, ROOT, {**settings, "width": {"trees": []}}))

    def environment(root: Path, own: Mapping[str, Any]) -> dict[str, str]:
        paths = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{root}:{python_path}"}
        return {CONFIG_ENV: json.dumps(own), **acceptance, **paths}

    return [
        Candidate(name, OURS, environment=environment(root, own), accept_length=0) for name, root, own in servers
    ]


def require_checkouts(found: Sequence[Candidate], environment: Mapping[str, str]) -> None:
    """Raises ValueError where a server would import another package than that of its checkout.

    Asked in the servers' working directory, which `-c` puts on the path as `-m` does.
    """
    for one in found:
        root = one.environment["PYTHONPATH"].partition(":")[0]
        code = "import dflash_sglang; print(dflash_sglang.__file__)"
        asked = {**environment, **one.environment}
        file = subprocess.run(
            [sys.executable, "-c", code], env=asked, capture_output=True, text=True, check=True
        ).stdout.strip()
        if Path(file).parents[1] != Path(root):
            raise ValueError(f"{one.name}: expected the package of {root}, found {file}. Name a checkout.")


def rate(steps: Mapping[str, Sequence[float]], seconds: float, concurrency: int) -> float:
    """Tokens per second that so many steps of each width commit in the long run."""
    lengths = {width: mean_length(ACCEPTANCE["good"], int(width)) for width in steps}
    return concurrency * sum(count * lengths[width] for width, (count, *_) in steps.items()) / seconds


def measure_held_out(server: Server, load: Load, seconds: float) -> dict[str, Any]:
    before = told(server)
    found = watch(server, load, seconds)
    return {
        "tokens_per_second": round(found.tokens_per_second, 1),
        "accept_length": round(found.accept_length, 3),
        "steps": since(before, told(server)),
    }


def measure(server: Server, load: Load, seconds: float) -> dict[str, Any]:
    server.post("/flush_cache?timeout=60")
    with clients(server, load):
        time.sleep(RAMP)
        before, start = told(server), time.perf_counter()
        time.sleep(seconds)
        steps, took = since(before, told(server)), time.perf_counter() - start
    return {"tokens_per_second": round(rate(steps, took, load.concurrency), 1), "steps": steps}


def start(candidate: Candidate, arguments: argparse.Namespace, scratch: Path, most: int, tokens: int) -> float:
    """Seconds from launch to ready of a server that then ends."""
    began = time.perf_counter()
    with server_of(candidate, arguments, scratch, requests=most, tokens=tokens) as server:
        wait_for(OURS, server)
        return round(time.perf_counter() - began, 2)


def claims(starts: Mapping[str, Sequence[float]], loads: Mapping[str, Any], kept: float) -> list[dict[str, Any]]:
    """starts: {checkout: seconds}; loads: {concurrency: {checkout: [what `measure` gave, by round]}}; kept: of
    tokens/s, at least."""
    out = []
    if all(starts.values()):
        ratio = statistics.median(starts[AFTER]) / statistics.median(starts[BEFORE])
        out.append(report.at_most("start-up time over before, median", round(ratio, 4), START_UP))
    for concurrency, of in loads.items():
        rates = {
            name: statistics.median(one["tokens_per_second"] for one in rounds) for name, rounds in of.items()
        }
        what = f"tokens/s over before, {concurrency} requests, median of {len(of[AFTER])} rounds"
        out.append(report.at_least(what, round(rates[AFTER] / rates[BEFORE], 4), kept))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS], accept_length=0)
    parser.add_argument("--before", required=True, type=Path, help="the other checkout")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--requests", type=int, help="that servers have room for; as many as loads have")
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer, on average")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a load that are measured")
    parser.add_argument("--starts", type=int, default=2, help="of each checkout, alone")
    parser.add_argument("--kept", type=float, default=0.99, help="of tokens/s over the other checkout, at least")
    widths = parser.add_mutually_exclusive_group()
    widths.add_argument("--width", type=int, help="of every step")
    widths.add_argument("--no-trees", action="store_true", help="one more server, without trees")
    parser.add_argument("--held-out", action="store_true", help="the packaged pair on its held-out prompts")
    arguments = parse(parser)
    python_path = os.environ.get("PYTHONPATH", "")
    forced = not arguments.held_out
    found = candidates(arguments.before, python_path, arguments.width, forced, arguments.no_trees)
    require_checkouts(found, os.environ)
    most = arguments.requests or max(arguments.concurrency)
    longest = int((1 + SPREAD) * arguments.output)
    tokens = most * (arguments.input + longest + 2 * BLOCK)  # no request waits for another one's end
    load, measured = Load(1, 1, arguments.input, arguments.output, token_ids=range(*arguments.token_ids)), measure
    if arguments.held_out:
        load, measured = (
            OfTexts(
                1, 1, output_tokens=arguments.output, texts=[list(text.encode()) for text in held_out_prompts()]
            ),
            measure_held_out,
        )
    by_name = {one.name: one for one in found}
    starts: dict[str, list[float]] = {name: [] for name in (BEFORE, AFTER)}
    loads: dict[str, dict[str, list[Any]]] = {}
    status = 1

    def keep() -> int:  # what is there, should the rest not come
        figures = {"start_up_s": starts, "loads": loads}
        return report.finish("bench.paired", arguments.out, claims(starts, loads, arguments.kept), figures=figures)

    with signals_as_exit(), tempfile.TemporaryDirectory() as scratch:
        for turn in range(arguments.starts + 1 if arguments.starts else 0):
            for name in rotated(list(starts), turn):
                seconds = start(by_name[name], arguments, Path(scratch), most, tokens)
                print(name, "ready after", seconds, flush=True)
                if turn:  # the first one compiles
                    starts[name].append(seconds)
            status = keep()
        if not arguments.concurrency:
            return status
        with together(found, arguments, requests=most, tokens=tokens, compiled=bool(arguments.starts)) as servers:
            for server in servers.values():
                occupy(server, dataclasses.replace(load, concurrency=most), WARM_UP)
            for concurrency in arguments.concurrency:
                of = dataclasses.replace(load, concurrency=concurrency)
                rounds = loads.setdefault(str(concurrency), {one.name: [] for one in found})
                for turn in range(arguments.rounds):
                    for name in rotated(list(servers), turn):
                        rounds[name].append(measured(servers[name], of, arguments.seconds))
                        print(concurrency, name, rounds[name][-1], flush=True)
                status = keep()
    return status


if __name__ == "__main__":
    sys.exit(main())
