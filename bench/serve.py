"""Step time on a GPU, paired: this package's worker, the built-in one and no speculation on one machine.

python -m bench.serve --target DIR --draft DIR --out FILE [--concurrency 1 32] [--sampling greedy sampled]
                      [--rounds 3] [--accept-length 6.4]

All three servers are up at once and take turns, so that a drift of the machine meets them alike; a figure is
the median over the rounds. Acceptance is forced: the weights may be random (see `bench.random_pair`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import report
from bench.load import Load, Outcome, run
from dflash_sglang.bench.kinds import BUILT_IN, ENVIRONMENT, OURS, PLAIN, wait_for
from dflash_sglang.demo.server import Server, free_port

SAMPLING: Mapping[str, dict[str, float]] = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.7, top_p=0.95),
}


def server_of(kind: str, arguments: argparse.Namespace, log: Path) -> Server:
    """The server of one kind on a free port, not started yet."""
    port = free_port()
    flags = [
        "--model-path", arguments.target, "--skip-tokenizer-init", "--port", str(port), "--host", "127.0.0.1",
        "--max-running-requests", str(max(arguments.concurrency)), "--min-free-slots-delay", "1",
        "--mem-fraction-static", str(arguments.mem_fraction), "--max-total-tokens", str(arguments.max_tokens),
        "--cuda-graph-max-bs-decode", str(max(arguments.concurrency)), *arguments.flags,
    ]  # fmt: skip
    if kind != PLAIN:
        flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", arguments.draft]
        flags += arguments.dflash_flags
    environment = {
        **os.environ, **ENVIRONMENT[kind], "SGLANG_SIMULATE_ACC_LEN": str(arguments.accept_length),
    }  # fmt: skip
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    return Server(command, port=port, environment=environment, log=log)


def measure(servers: Mapping[str, Server], arguments: argparse.Namespace) -> dict[str, Any]:
    """{concurrency: {sampling: {kind: {figure: [one value per round]}}}}"""
    figures: dict[str, Any] = {}
    for concurrency in arguments.concurrency:
        loads = {
            name: Load(concurrency, max(4, 2 * concurrency), arguments.input, arguments.output, **SAMPLING[name])
            for name in arguments.sampling
        }
        rounds: dict[str, dict[str, list[Outcome]]] = {name: {kind: [] for kind in servers} for name in loads}
        for load in loads.values():
            for server in servers.values():
                run(server, dataclasses.replace(load, requests=concurrency, output_tokens=64))
        for _ in range(arguments.rounds):
            for name, load in loads.items():
                for kind, server in servers.items():
                    rounds[name][kind].append(run(server, load))
                    print(concurrency, name, kind, rounds[name][kind][-1], flush=True)
        figures[str(concurrency)] = {
            name: {
                kind: {
                    field.name: [round(getattr(outcome, field.name), 4) for outcome in outcomes]
                    for field in dataclasses.fields(Outcome)
                }
                for kind, outcomes in kinds.items()
            }
            for name, kinds in rounds.items()
        }
    return figures


def claims(
    figures: Mapping[str, Any], bound: float, sampled_bound: float, bounds: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Per concurrency: our step time over the built-in worker's, and our sampled step over our greedy one.

    bounds: of the former by (sampling, concurrency), in place of `bound`.
    """
    out = []

    def claim(what: str, ours: float, other: float, bound: float) -> None:
        out.append(report.at_most(what, round(ours / other, 4), bound))

    for concurrency, by_sampling in figures.items():
        step = {
            (name, kind): statistics.median(figure["step_ms"])
            for name, kinds in by_sampling.items()
            for kind, figure in kinds.items()
        }
        where = f"at concurrency {concurrency}, median of rounds"
        for name in by_sampling:
            if {(name, OURS), (name, BUILT_IN)} <= set(step):
                what = f"{name} step time over the built-in worker's {where}"
                claim(what, step[name, OURS], step[name, BUILT_IN], bounds.get((name, concurrency), bound))
        if {("sampled", OURS), ("greedy", OURS)} <= set(step):
            what = f"sampled step time over the greedy one {where}"
            claim(what, step["sampled", OURS], step["greedy", OURS], sampled_bound)
    return out


def _bound(text: str) -> tuple[tuple[str, str], float]:
    cell, ratio = text.split("=")
    sampling, concurrency = cell.split(":")
    if sampling not in SAMPLING:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(SAMPLING)} before the colon")
    return (sampling, concurrency), float(ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accept-length", type=float, default=6.4)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=["greedy"])
    parser.add_argument("--bound", type=float, default=1.03, help="of the step-time ratio to the built-in worker")
    parser.add_argument(
        "--bounds", type=_bound, nargs="+", default=[], metavar="SAMPLING:CONCURRENCY=RATIO",
        help="in place of --bound, such as greedy:1=0.95",
    )  # fmt: skip
    parser.add_argument(
        "--sampled-bound", type=float, default=1.05, help="of the sampled step over the greedy one"
    )
    parser.add_argument("--mem-fraction", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=60_000)
    parser.add_argument("--kinds", nargs="+", choices=[OURS, BUILT_IN, PLAIN], default=[OURS, BUILT_IN, PLAIN])
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of every server, one string")
    parser.add_argument("--dflash-flags", type=shlex.split, default=[], help="more flags of the DFLASH servers")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        servers: dict[str, Server] = {}
        # The first start fills the compilation caches that the others, started together, then share.
        for together in (arguments.kinds[:1], arguments.kinds[1:]):
            for kind in together:
                servers[kind] = stack.enter_context(server_of(kind, arguments, Path(scratch) / f"{kind}.log"))
            for kind in together:
                wait_for(kind, servers[kind])
        figures = measure(servers, arguments)
    claimed = claims(figures, arguments.bound, arguments.sampled_bound, dict(arguments.bounds))
    return report.finish("bench.serve", arguments.out, claimed, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
