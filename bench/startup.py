"""Seconds from launch to ready, and what the first requests take: this package's worker and the built-in one.

python -m bench.startup --target DIR --draft DIR --out FILE [--rounds 3] [--requests 10]
                        [--sampling greedy sampled]

A round starts one server for each worker and sampling, by turns and one at a time, so that neither sampling warms
the other's requests; each gets requests of the same lengths, one after the other. Before all rounds each worker is
started once uncounted, with requests of every sampling: that fills the caches of files and of compiled kernels.
Acceptance is forced to a whole number of tokens, so that all requests take as many steps.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import report
from bench.load import Load, ask
from bench.serve import SAMPLING
from bench.servers import Candidate, add_options, parse, server_of
from dflash_sglang.bench.load import rotated
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import BUILT_IN, OURS, wait_for
from dflash_sglang.demo.signals import signals_as_exit

SETTLED = slice(4, 10)  # requests 5 to 10
POLL_SECONDS = 0.05
# Before each request. Once it is ready, SGLang counts the objects of each of its processes, 0.07 s; and the GPU's
# clocks fall while it has nothing to do.
PAUSE = 1.0
# /health answers as soon as the server is up, and asks it for no token, which would be a request before the first.
HEALTH_ALONE = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


def start(kind: str, samplings: list[str], arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Starts a server, has it answer requests of these samplings, and ends it; the figures are of the last one."""
    tokens = arguments.max_running_requests * (arguments.input + arguments.output + 64)
    server = server_of(
        Candidate(kind, kind),
        arguments,
        scratch,
        requests=arguments.max_running_requests,
        tokens=tokens,
        **HEALTH_ALONE,
    )
    server.poll_seconds = POLL_SECONDS
    began = time.perf_counter()
    with server:
        wait_for(kind, server)
        seconds = time.perf_counter() - began
        for name in samplings:
            load = Load(
                1,
                arguments.requests,
                arguments.input,
                arguments.output,
                token_ids=range(*arguments.token_ids),
                waves=True,
                pause=PAUSE,
                **SAMPLING[name],
            )
            answers = ask(server, load)
        (scheduler, *_) = server.get("/server_info")["internal_states"]
    latencies = [1000 * answer.seconds for answer in answers]
    return {
        "ready_s": round(seconds, 2),
        "scheduler_s": round(scheduler["startup_time"]["scheduler_e2e"], 2),  # of these, without imports
        "latency_ms": [round(latency, 2) for latency in latencies],
        "first_token_ms": [round(1000 * (answer.first - answer.asked), 2) for answer in answers],
        "first_over_settled": round(latencies[0] / statistics.median(latencies[SETTLED]), 4),
        "verify_steps": [answer.verify_steps for answer in answers],
    }


def claims(figures: Mapping[str, Any], bound: float, first_bound: float) -> list[dict[str, Any]]:
    """Of the rounds that all servers have been through: start-up over the built-in worker's, first requests.

    figures: {kind: {sampling: [what `start` gave, by round]}}
    """
    rounds = min(len(starts) for by_sampling in figures.values() for starts in by_sampling.values())
    if not rounds:
        return []
    out = []
    ready = {
        kind: statistics.median(one["ready_s"] for starts in by_sampling.values() for one in starts[:rounds])
        for kind, by_sampling in figures.items()
    }
    where = f"median of {rounds} rounds"
    if {OURS, BUILT_IN} <= set(ready):
        what = f"start-up time over the built-in worker's, {where}"
        out.append(report.at_most(what, round(ready[OURS] / ready[BUILT_IN], 4), bound))
    if OURS in figures:
        for name, starts in figures[OURS].items():
            ratio = statistics.median(one["first_over_settled"] for one in starts[:rounds])
            what = f"latency of the first {name} request over the median of requests 5 to 10, {where}"
            out.append(report.at_most(what, round(ratio, 4), first_bound))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS, BUILT_IN], accept_length=6.0)
    parser.add_argument("--output", type=int, default=253, help="tokens of an answer: the first and whole steps")
    parser.add_argument("--requests", type=int, default=SETTLED.stop, help="of a server, one after the other")
    parser.add_argument("--sampling", nargs="+", choices=list(SAMPLING), default=list(SAMPLING))
    parser.add_argument("--max-running-requests", type=int, default=32, help="that the servers are set up for")
    parser.add_argument("--bound", type=float, default=1.0, help="of start-up over the built-in worker's")
    parser.add_argument("--first-bound", type=float, default=1.1, help="of the first request over later ones")
    arguments = parse(parser)
    if arguments.requests < SETTLED.stop:
        parser.error(
            f"--requests {arguments.requests}: expected {SETTLED.stop} or more; 5 to 10 are compared with"
        )
    figures: dict[str, Any] = {kind: {name: [] for name in arguments.sampling} for kind in arguments.kinds}
    status = 1
    with signals_as_exit(), tempfile.TemporaryDirectory() as scratch:
        for kind in arguments.kinds:
            print("fills the caches:", kind, start(kind, arguments.sampling, arguments, Path(scratch)), flush=True)
        for turn in range(arguments.rounds):
            for kind, name in itertools.product(rotated(arguments.kinds, turn), arguments.sampling):
                figures[kind][name].append(start(kind, [name], arguments, Path(scratch)))
                print(kind, name, figures[kind][name][-1], flush=True)
                # What is there, should the rest not come.
                claimed = claims(figures, arguments.bound, arguments.first_bound)
                status = report.finish("bench.startup", arguments.out, claimed, figures=figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
