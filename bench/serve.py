"""Step time on a GPU, paired: this package's worker, the built-in one and no speculation on one machine.

python -m bench.serve --target DIR --draft DIR --out FILE [--concurrency 1 32] [--sampling greedy sampled]
                      [--rounds 3] [--accept-length 6.4]
                      [--variants "fp8=--speculative-draft-model-quantization fp8"] [--variant-bound 1.005]

All servers are up at once and take turns, so that a drift of the machine meets them alike; a figure is the median
over the rounds. Acceptance is forced: the weights may be random (see `dflash_sglang.bench.random_pair`).
`--variants`: more servers with this package's worker, each with flags and, before them, variables of its own.
`"before=PYTHONPATH=DIR:$PYTHONPATH PYTHONSAFEPATH=1"` has the package of another checkout. `--variant-bound`: of
our step time over that of each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from bench import report
from bench.load import take_turns
from bench.paired import require_checkouts
from bench.servers import Candidate, add_load_options, add_options, at_each_concurrency, load_of, parse
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from dflash_sglang.demo.server import Server

SAMPLING: Mapping[str, dict[str, float]] = {
    "greedy": dict(temperature=0.0),
    "sampled": dict(temperature=0.7, top_p=0.95),
}


def measure(servers: Mapping[str, Server], arguments: argparse.Namespace, concurrency: int) -> dict[str, Any]:
    """{sampling: {server: {figure: [one value per round]}}}"""
    figures = {}
    for name in arguments.sampling:
        print(name, flush=True)
        load = load_of(arguments, concurrency, **SAMPLING[name])
        figures[name] = take_turns(servers, load, arguments.rounds)
    return figures


def claims(
    figures: Mapping[str, Any],
    bound: float,
    sampled_bound: float,
    bounds: Mapping[tuple[str, str], float],
    variant_bound: float | None = None,
) -> list[dict[str, Any]]:
    """Per concurrency: our step time over the built-in worker's, that of our variants, too, ours over that of each
    variant where that has a bound, and our sampled step over our greedy one.

    bounds: of the first by (sampling, concurrency), in place of `bound`.
    """
    out = []

    def claim(what: str, ours: float, other: float, bound: float) -> None:
        out.append(report.at_most(what, round(ours / other, 4), bound))

    for concurrency, by_sampling in figures.items():
        step = {
            (name, server): statistics.median(figure["step_ms"])
            for name, servers in by_sampling.items()
            for server, figure in servers.items()
        }
        where = f"at concurrency {concurrency}, median of rounds"
        for name in by_sampling:
            for server in by_sampling[name]:
                if server.startswith(OURS) and (name, BUILT_IN) in step:
                    variant = server.removeprefix(OURS).replace("_", ", ", 1)
                    what = f"{name} step time over the built-in worker's {where}{variant}"
                    claim(what, step[name, server], step[name, BUILT_IN], bounds.get((name, concurrency), bound))
                if server.startswith(f"{OURS}_") and variant_bound is not None:
                    what = f"{name} step time over that of {server.removeprefix(f'{OURS}_')} {where}"
                    claim(what, step[name, OURS], step[name, server], variant_bound)
        if {("sampled", OURS), ("greedy", OURS)} <= set(step):
            what = f"sampled step time over the greedy one {where}"
            claim(what, step["sampled", OURS], step["greedy", OURS], sampled_bound)
    return out


def _variant(text: str) -> Candidate:
    name, _, line = text.partition("=")
    words = shlex.split(line)
    variables = list(itertools.takewhile(re.compile("[A-Z_]+=").match, words))
    flags = tuple(words[len(variables) :])
    environment = dict(word.split("=", 1) for word in variables)
    return Candidate(f"{OURS}_{name}", OURS, flags=flags, environment=environment)


def _bound(text: str) -> tuple[tuple[str, str], float]:
    cell, ratio = text.split("=")
    sampling, concurrency = cell.split(":")
    if sampling not in SAMPLING:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join(SAMPLING)} before the colon")
    return (sampling, concurrency), float(ratio)


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS, BUILT_IN, PLAIN], accept_length=6.4)
    add_load_options(parser, [1, 32])
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=["greedy"])
    parser.add_argument("--bound", type=float, default=1.03, help="of the step-time ratio to the built-in worker")
    parser.add_argument(
        "--bounds", type=_bound, nargs="+", default=[], metavar="SAMPLING:CONCURRENCY=RATIO",
        help="in place of --bound, such as greedy:1=0.95",
    )  # fmt: skip
    parser.add_argument(
        "--sampled-bound", type=float, default=1.05, help="of the sampled step over the greedy one"
    )
    parser.add_argument(
        "--variants", type=_variant, nargs="+", default=[], metavar="NAME=[VARIABLE=VALUE...] [FLAGS]",
        help="of this package's worker",
    )  # fmt: skip
    parser.add_argument("--variant-bound", type=float, help="of our step time over that of each variant")
    arguments = parse(parser)
    require_checkouts([one for one in arguments.variants if "PYTHONPATH" in one.environment], os.environ)
    candidates = [*(Candidate(kind, kind) for kind in arguments.kinds), *arguments.variants]
    bounds = (arguments.bound, arguments.sampled_bound, dict(arguments.bounds), arguments.variant_bound)
    return at_each_concurrency(
        "bench.serve",
        candidates,
        arguments,
        lambda servers, concurrency: measure(servers, arguments, concurrency),
        lambda figures: claims(figures, *bounds),
    )


if __name__ == "__main__":
    sys.exit(main())
