"""What the first batches of a server take: the time of the first of each size over that of the tenth.

python -m bench.first_batches --target DIR --draft DIR --out FILE [--requests 1 8 32] [--rounds 3]

A round starts our server, which chooses its widths, and sends it ten batches of each size, the smallest first. A
batch comes when the one before has ended. One start before all rounds is not counted: it fills the compilation
caches. Acceptance is forced to a whole number of tokens, so that answers of one width take as many steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.load import Answer, Load, ask
from bench.servers import Candidate, add_options, parse, server_of
from bench.startup import HEALTH_ALONE, PAUSE, POLL_SECONDS
from bench.widths import BLOCK
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, wait_for
from dflash_sglang.demo.signals import signals_as_exit
from dflash_sglang.settings.plugin_config import CONFIG_ENV

BATCHES = 10
FIRST = 1.1  # over the tenth, at most
ACCEPTED = 5  # proposals of a step
SETTINGS = {"simulated_acceptance": [1.0] * ACCEPTED + [0.0] * (BLOCK - 1 - ACCEPTED), "width": {}}


def by_batch(answers: Sequence[Answer], size: int) -> dict[str, list[float]]:
    """Of each batch of `size`: milliseconds from its first request to its last token (`ms`) and to its last first
    token (`prefill_ms`), and the most verify steps of a request (`steps`)."""
    batches = [answers[first : first + size] for first in range(0, len(answers), size)]

    def until_last(moment: Callable[[Answer], float]) -> list[float]:
        return [round(1000 * (max(map(moment, batch)) - min(one.asked for one in batch)), 2) for batch in batches]

    return {
        "ms": until_last(lambda one: one.last),
        "prefill_ms": until_last(lambda one: one.first),
        "steps": [max(one.verify_steps for one in batch) for batch in batches],
    }


def start(arguments: argparse.Namespace, scratch: Path) -> dict[str, dict[str, list[float]]]:
    """{size: `by_batch`} of a server that then ends."""
    most = max(arguments.requests)
    tokens = most * (arguments.input + arguments.output + 4 * BLOCK)
    one = Candidate(OURS, OURS, environment={CONFIG_ENV: json.dumps(SETTINGS), **HEALTH_ALONE}, accept_length=0)
    server = server_of(one, arguments, scratch, requests=most, tokens=tokens)
    server.poll_seconds = POLL_SECONDS
    found = {}
    with server:
        wait_for(OURS, server)
        for size in sorted(arguments.requests):
            load = Load(
                size,
                BATCHES * size,
                arguments.input,
                arguments.output,
                token_ids=range(*arguments.token_ids),
                waves=True,
                pause=PAUSE,
            )
            found[str(size)] = by_batch(ask(server, load), size)
    return found


def claims(figures: Mapping[str, Sequence[Mapping[str, Sequence[float]]]]) -> list[dict[str, Any]]:
    """figures: {size: [`by_batch`, by round]}."""
    return [
        report.at_most(
            f"first batch of {size} over the tenth, median of {len(rounds)} rounds",
            round(statistics.median(of["ms"][0] / of["ms"][BATCHES - 1] for of in rounds), 4),
            FIRST,
        )
        for size, rounds in figures.items()
    ]


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS], accept_length=0)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="of a batch")
    parser.add_argument("--output", type=int, default=253, help="tokens of an answer: the first and whole steps")
    parser.set_defaults(input=128, mem_fraction=0.85)
    arguments = parse(parser)
    figures: dict[str, list[dict[str, list[float]]]] = {}
    status = 1
    with signals_as_exit(), tempfile.TemporaryDirectory() as scratch:
        print("fills the caches:", start(arguments, Path(scratch)), flush=True)
        for _ in range(arguments.rounds):
            for size, batches in start(arguments, Path(scratch)).items():
                figures.setdefault(size, []).append(batches)
            print({size: rounds[-1] for size, rounds in figures.items()}, flush=True)
            # What is there, should the rest not come.
            status = report.finish("bench.first_batches", arguments.out, claims(figures), figures=figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
