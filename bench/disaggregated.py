"""Steps of a decode server on a GPU, paired with the built-in worker's, and with a server that also prefills.

python -m bench.disaggregated --target DIR --draft DIR --out FILE [--concurrency 1 8 32] [--rounds 3]
                              [--accept-length 6.4]

Nothing is transferred. SGLang's `fake` backend makes up first tokens, and leaves the KV of prompts as it is in the
pool. Acceptance is forced, so neither matters. Requests come in waves: no prefill is part of any step.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from typing import Any

from bench import report
from bench.load import take_turns
from bench.servers import Candidate, add_load_options, add_options, at_each_concurrency, load_of, parse
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import BUILT_IN, OURS
from dflash_sglang.demo.server import Server

DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")
FAKE_HOST = "2.2.2.2"  # of a prefill server; a decode server ends where a request names none
ONE_SERVER = "ours_one_server"
BUILT_IN_SHARE = 0.95  # of the built-in worker's time per output token, at most
ONE_SERVER_SHARE = 1.01  # of the step of one server, at most


def claims(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """figures: {concurrency: {server: {figure: [one value per round]}}}"""
    out = []
    for concurrency, servers in figures.items():
        where = f"at concurrency {concurrency}, median of rounds"
        if BUILT_IN in servers:
            ours, built_in = (per_token(servers[kind]) for kind in (OURS, BUILT_IN))
            what = f"time per output token over the built-in worker's {where}"
            out.append(report.at_most(what, round(ours / built_in, 4), BUILT_IN_SHARE))
        apart, one = (statistics.median(servers[name]["step_ms"]) for name in (OURS, ONE_SERVER))
        out.append(report.at_most(f"step time over one server's {where}", round(apart / one, 4), ONE_SERVER_SHARE))
    return out


def per_token(figure: Mapping[str, list[float]]) -> float:
    """ms"""
    rounds = zip(figure["step_ms"], figure["accept_length"], strict=True)
    return statistics.median(step / tokens for step, tokens in rounds)


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS, BUILT_IN], accept_length=6.4)
    add_load_options(parser, [1, 8, 32])
    arguments = parse(parser)
    candidates = [Candidate(ONE_SERVER, OURS), *(Candidate(kind, kind, DECODE) for kind in arguments.kinds)]

    def measure(servers: Mapping[str, Server], concurrency: int) -> dict[str, Any]:
        load = load_of(arguments, concurrency, fields=dict(bootstrap_host=FAKE_HOST))
        return take_turns(servers, load, arguments.rounds)

    return at_each_concurrency("bench.disaggregated", candidates, arguments, measure, claims)


if __name__ == "__main__":
    sys.exit(main())
