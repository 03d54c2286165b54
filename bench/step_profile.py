"""Decode steps taken apart on a GPU: what is not the target's verify forward, launches outside graphs, idle time.

python -m bench.step_profile --target DIR --draft DIR --out FILE [--concurrency 1 32] [--rounds 3]
                             [--token-map FILE | --token-map-size N] [--in-turn]

Serves the built-in worker and this package's, the latter once more with a token map where one is given, and
profiles some decode steps of each in every round; a claim is about the median. Acceptance is forced: the weights
may be random (see `dflash_sglang.bench.random_pair`).

What is not the target's verify forward is our step less the graph in which the BUILT-IN worker verifies, from its
first kernel to its last, in the same run. That graph holds the target's forward and nothing else; ours ends with
context KV, argmax and accept as well, which are no part of the forward. `beyond_verify_ms` has the built-in
worker's own beside ours.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.load import Load, ask
from bench.servers import Candidate, add_options, parse, together
from dflash_sglang.bench import profile
from dflash_sglang.bench.load import rotated
from dflash_sglang.bench.script import script_parser
from dflash_sglang.bench.table import step_table
from dflash_sglang.bench.trace import OUTSIDE
from dflash_sglang.checkpoint.token_map import FLAG, read_token_map
from dflash_sglang.demo.launch import BUILT_IN, OURS
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit

WITH_MAP = "ours_token_map"
KERNEL_NAME = 160  # characters that are kept of it
MARGIN = 64  # slots of a request beside its tokens: blocks are drafted beyond its end
Rounds = list[dict[str, Any]]  # of one server at one concurrency, as `profile.take_apart` gives them


def candidates_of(arguments: argparse.Namespace, token_map: Path | None) -> list[Candidate]:
    found = [Candidate(kind, kind) for kind in arguments.kinds]
    if token_map is not None:
        found.append(Candidate(WITH_MAP, OURS, (FLAG, str(token_map))))
    return found


@contextlib.contextmanager
def token_map_of(arguments: argparse.Namespace) -> Iterator[Path | None]:
    """The file with the token map that is asked for. Raises TokenMapError, before any server starts."""
    if arguments.token_map_size is None:
        if arguments.token_map is not None:
            read_token_map(str(arguments.token_map))
        yield arguments.token_map
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "token_map.pt"
        torch.save(list(range(arguments.token_map_size)), path)
        yield path


def measure(
    candidates: Sequence[Candidate], arguments: argparse.Namespace, traces: Path
) -> Iterator[tuple[int, dict[str, Rounds]]]:
    """(concurrency, what the servers gave that are up at it), as it comes."""
    most = max(arguments.concurrency)
    tokens = most * (arguments.input + profile.PROFILED_TOKENS + MARGIN)
    progress = Progress(sys.stdout)
    for group in [[one] for one in candidates] if arguments.in_turn else [candidates]:
        with together(group, arguments, requests=most, tokens=tokens) as servers:
            for concurrency in arguments.concurrency:
                yield concurrency, of_concurrency(servers, concurrency, arguments, traces, progress)


def of_concurrency(
    servers: Mapping[str, Server],
    concurrency: int,
    arguments: argparse.Namespace,
    traces: Path,
    progress: Progress,
) -> dict[str, Rounds]:
    load = Load(concurrency, concurrency, arguments.input, 64, token_ids=range(*arguments.token_ids))
    requests = [{"input_ids": prompt} for prompt in load.prompts()]
    found: dict[str, Rounds] = {name: [] for name in servers}
    for server in servers.values():
        ask(server, load)
    for turn in range(arguments.rounds):
        for name in rotated(list(servers), turn):
            directory = traces / f"{name}_{concurrency}_{turn}"
            found[name].append(profile.take_apart(servers[name], name, requests, directory, progress))
    return found


def figures_of(rounds: Rounds) -> dict[str, Any]:
    """The times and counts of every round; kernels by name of one whose step is the median."""
    told = ("outside_kernels", "graph_kernels")
    at = statistics.median_low(one["step_ms"] for one in rounds)
    middle = next(one for one in rounds if one["step_ms"] == at)
    return {
        "rounds": [
            {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in {**one, "idle_between_launches": between_launches(one)}.items()
                if key not in (*told, "concurrency", "trace")
            }
            for one in rounds
        ],
        "kernels_by_name": {
            part: [[name[:KERNEL_NAME], round(count, 2), round(us, 2)] for name, count, us in kernels]
            for part, kernels in {**middle["graph_kernels"], OUTSIDE: middle["outside_kernels"]}.items()
        },
    }


def between_launches(step: Mapping[str, Any]) -> float:
    """The idle share without the gaps between the kernels of a graph."""
    return (step["gaps_ms"] - step["gaps_in_graphs_ms"]) / step["step_ms"]


def median(figures: Mapping[str, Any], name: str) -> float:
    return statistics.median(one[name] for one in figures["rounds"])


def beyond_verify(by_server: Mapping[str, Any]) -> dict[str, float]:
    """{server: ms of its step beside the built-in worker's verify graph}, empty without that worker."""
    if BUILT_IN not in by_server:
        return {}
    verify = median(by_server[BUILT_IN], "verify_span_ms")
    return {name: round(median(figures, "step_ms") - verify, 4) for name, figures in by_server.items()}


def claims(figures: Mapping[str, Any], bounds: argparse.Namespace) -> list[dict[str, Any]]:
    """Of our servers: launches at every concurrency; at concurrency 1 what is not verify, and idle time."""
    out = []
    for concurrency, by_server in figures.items():
        where = f"at concurrency {concurrency}, median of rounds"
        for name in (OURS, WITH_MAP):
            if name in by_server:
                outside = statistics.median(one["kernels"][OUTSIDE] for one in by_server[name]["rounds"])
                what = f"{name}: kernels outside graphs per step {where}"
                out.append(report.at_most(what, round(outside, 2), bounds.outside))
        if concurrency != "1":
            continue
        if OURS in by_server:
            between = median(by_server[OURS], "idle_between_launches")
            what = (
                f"{OURS}: share of the step in which the GPU is idle {where} "
                f"(without the gaps between the kernels of a graph: {between})"
            )
            out.append(report.at_most(what, median(by_server[OURS], "idle"), bounds.idle))
        beyond = beyond_verify(by_server)
        for name, bound in ((OURS, bounds.beyond_verify), (WITH_MAP, bounds.beyond_verify_token_map)):
            if name in beyond:
                what = (
                    f"{name}: ms of the step beside the target's verify forward {where} "
                    f"(the built-in worker's own: {beyond[BUILT_IN]})"
                )
                out.append(report.at_most(what, beyond[name], bound))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [BUILT_IN, OURS], accept_length=6.4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--token-map", type=Path, help=f"serve ours once more, with this file as {FLAG}")
    given.add_argument("--token-map-size", type=int, help="the same, with a map of so many first tokens")
    parser.add_argument("--in-turn", action="store_true", help="one server at a time, where memory is short")
    parser.add_argument("--traces", type=Path, help="directory that keeps the traces")
    parser.add_argument("--outside", type=float, default=8, help="bound of the kernels outside graphs per step")
    parser.add_argument("--idle", type=float, default=0.02, help="bound of the idle share")
    parser.add_argument("--beyond-verify", type=float, default=1.0, help="bound, ms beside the verify forward")
    parser.add_argument("--beyond-verify-token-map", type=float, default=0.85, help="the same with a token map")
    arguments = parse(parser)
    figures: dict[str, Any] = {}
    status = 1
    with (
        signals_as_exit(),
        token_map_of(arguments) as token_map,
        tempfile.TemporaryDirectory() as scratch,
        contextlib.closing(
            measure(candidates_of(arguments, token_map), arguments, arguments.traces or Path(scratch))
        ) as measured,
    ):
        for concurrency, by_server in measured:
            for name, rounds in by_server.items():
                figures.setdefault(str(concurrency), {})[name] = figures_of(rounds)
                print(step_table({"server": name, **rounds[-1]}), flush=True)
            # What is there, should the rest not come.
            status = report.finish(
                "bench.step_profile",
                arguments.out,
                claims(figures, arguments),
                figures=figures,
                beyond_verify_ms={at: beyond for at, of in figures.items() if (beyond := beyond_verify(of))},
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
