"""What a prefill costs: how long it holds up the requests that decode beside it, and its own time to first token.

python -m bench.prefills --target DIR --draft DIR --out FILE [--beside 7 31] [--input 256] [--every 0.1]

Acceptance is that of `bench.widths --acceptance recorded`. So many requests decode; for some seconds alone, then
with a new request every `--every` seconds, each of which ends after `--few` tokens. Held up: the share of their
tokens per second that is lost then, over the new requests of a second. Servers take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench import report
from bench.load import Load
from bench.servers import add_options, parse, together
from bench.steady import RAMP, Look, clients
from bench.widths import PAIR_RECORD, candidates_of
from dflash_sglang.bench.load import rotated
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit

LIKE_BUILT_IN = 1.05  # held up, and to the first token, of what it is with the built-in worker
OUTPUT = 3000  # tokens of a request that decodes, on average


def first_token(server: Server, load: Load, seed: int, few: int) -> float:
    """Seconds from a request to its first token; the request is answered then."""
    asked, first = time.perf_counter(), 0.0
    for _ in server.stream(input_ids=load.prompt(random.Random(seed)), sampling_params=load.sampling(few, 1)):
        first = first or time.perf_counter() - asked
    return first


def disturbed(server: Server, load: Load, arguments: argparse.Namespace) -> dict[str, float]:
    """One round: ms that a new request holds the others up, and its ms to the first token, the median."""
    server.post("/flush_cache?timeout=60")
    count = round(arguments.seconds / arguments.every)
    with clients(server, load) as asking, ThreadPoolExecutor(count) as pool:
        time.sleep(RAMP)
        start = time.perf_counter()
        time.sleep(arguments.seconds)
        middle, coming = time.perf_counter(), []
        for number in range(count):
            time.sleep(max(0.0, middle + number * arguments.every - time.perf_counter()))
            coming.append(pool.submit(first_token, server, load, 1000 + number, arguments.few))
        end = middle + count * arguments.every
        time.sleep(max(0.0, end - time.perf_counter()))
        waits = [1000 * one.result() for one in coming]
    looks = [look for client in asking for look in client.looks]
    alone, beside = rate(looks, start, middle), rate(looks, middle, end)
    held_up = 1000 * arguments.every * (1 - beside / alone)
    return {"held_up_ms": round(held_up, 3), "first_token_ms": round(statistics.median(waits), 3), "alone": alone}


def rate(looks: list[Look], start: float, end: float) -> float:
    """Tokens per second of all clients."""
    return round(sum(look.tokens for look in looks if start < look.at <= end) / (end - start), 1)


def claims(figures: Mapping[str, Mapping[str, list[dict[str, float]]]]) -> list[dict[str, Any]]:
    """Ours over the built-in worker's, medians of rounds."""
    out = []
    for beside, servers in figures.items():
        for figure, what in (("held_up_ms", "held up by a prefill"), ("first_token_ms", "time to first token")):
            of = {name: statistics.median(one[figure] for one in rounds) for name, rounds in servers.items()}
            where = f"{beside} requests: {what}, over the built-in worker's"
            out.append(report.at_most(where, round(of[OURS] / of[BUILT_IN], 4), LIKE_BUILT_IN))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS, PLAIN, BUILT_IN], accept_length=1.0)
    parser.add_argument("--beside", type=int, nargs="+", default=[7, 31], help="requests that decode")
    parser.add_argument("--every", type=float, default=0.1, help="seconds from one new request to the next")
    parser.add_argument("--few", type=int, default=8, help="tokens of a new request's answer")
    parser.add_argument("--seconds", type=float, default=3.0, help="alone, and as many with new requests")
    arguments = parse(parser)
    others = dict(acceptance="recorded", trees=[], alike=False, gpus=None, built_in_flags=[])
    arguments = argparse.Namespace(**vars(arguments), **others)
    most = max(arguments.beside) + 2
    tokens = most * (arguments.input + 2 * OUTPUT)
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    status, candidates = 1, candidates_of(arguments, PAIR_RECORD)
    with signals_as_exit(), together(candidates, arguments, requests=most, tokens=tokens) as servers:
        for beside in arguments.beside:
            ids = range(*arguments.token_ids)
            load = Load(beside, 1, arguments.input, OUTPUT, token_ids=ids)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
            for turn in range(arguments.rounds + 1):  # the first one warms up
                for name in rotated(list(servers), turn):
                    one = disturbed(servers[name], load, arguments)
                    print(beside, name, one, flush=True)
                    found[name] += [one] if turn else []
            figures[str(beside)] = found
            status = report.finish("bench.prefills", arguments.out, claims(figures), figures=figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
