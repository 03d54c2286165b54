"""Tokens per second of a target with recurrent layers on one GPU: ours beside fixed widths, built-in and plain.

python -m bench.recurrent --target DIR --draft DIR --out FILE [--requests 1 8 32 64] [--fixed 16 8 4] [--rounds 3]
                          [--seconds 6] [--add]

Random weights do. `python -m dflash_sglang.bench.random_pair DIR --shape hybrid-9b --config-only` writes them; the
servers then need `"--flags=--load-format dummy" "--dflash-flags=--speculative-draft-load-format auto"`.

One server is up at a time, because SGLang gives recurrent states a share of all free memory. A round starts each
server and gives it every load; the next round starts them in another order. `--add` adds rounds to those that
`--out` holds, so that several short runs make one result.

`ours_16` is a load of our server whose requests ask for width 16, as in `bench.widths`. Acceptance is forced by
position and the same everywhere (`bench.coins` for the built-in worker). `by_steps` is tokens per second at the
accept length that the coins have in the long run, so that the few coins of one request add no noise.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.like_for_like import candidate, expected_length
from bench.load import Load
from bench.servers import add_options, parse, server_of
from bench.steady import SPREAD, WARM_UP, occupy, watch
from bench.widths import ACCEPTANCE, BEST, BLOCK, forced, mean_length, require_served, since, told
from dflash_sglang.bench.load import rotated
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN, wait_for
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit

OVER_BUILT_IN = {"1": 1.05, "8": 1.05, "32": 1.5}
[PROFILE] = ACCEPTANCE["good"]
Figures = dict[str, dict[str, dict[str, list[Any]]]]  # {requests: {name: {figure: [one value per round]}}}


def measure(server: Server, name: str, load: Load, seconds: float) -> dict[str, Any]:
    """The figures of one steady load after one that is not measured, which a width policy settles in."""
    occupy(server, load, WARM_UP)
    before = told(server) if name.startswith(OURS) else None
    outcome = watch(server, load, seconds)
    figures = {figure: round(value, 4) for figure, value in dataclasses.asdict(outcome).items()}
    by_width = {} if before is None else {"by_width": since(before, told(server))}
    length = expected_length(name, {figure: [of] for figure, of in by_width.items()}, 0, PROFILE)
    # It does not count requests, so it also holds where a server runs fewer at a time than there are clients.
    by_steps = round(outcome.tokens_per_second * length / outcome.accept_length, 1)
    return {**figures, "by_steps": by_steps, **by_width}


def add(figures: Figures, requests: int, name: str, found: Mapping[str, Any]) -> None:
    """Appends the figures of one more round."""
    kept = figures.setdefault(str(requests), {}).setdefault(name, {})
    for figure, value in found.items():
        kept.setdefault(figure, []).append(value)


def claims(figures: Figures, names: Sequence[str]) -> list[dict[str, Any]]:
    """Ours over the best of fixed widths and plain, and over the built-in worker, at each number of requests whose
    loads all have a round. Only rounds that all of `names` have been through count."""
    out = []
    for requests, by_name in figures.items():
        rounds = min(len(by_name[name]["by_steps"]) if name in by_name else 0 for name in names)
        if not rounds:
            continue
        rate = {name: statistics.median(by_name[name]["by_steps"][:rounds]) for name in names}
        ours, built_in = rate.pop(OURS), rate.pop(BUILT_IN, None)
        where = f"{requests} requests, median of {rounds} rounds: tokens/s over"
        if rate:
            best = max(rate, key=rate.__getitem__)
            what = f"{where} the best of fixed widths and plain, {best}"
            out.append(report.at_least(what, round(ours / rate[best], 4), BEST["good"]))
        if built_in is not None and requests in OVER_BUILT_IN:
            what = f"{where} the built-in worker at its default width"
            out.append(report.at_least(what, round(ours / built_in, 4), OVER_BUILT_IN[requests]))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS, PLAIN, BUILT_IN], accept_length=0)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64], help="at a time")
    parser.add_argument("--fixed", type=int, nargs="*", default=[16, 8, 4], help="widths")
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer, on average")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a load that are measured")
    parser.add_argument("--add", action="store_true", help="rounds to those that --out holds")
    parser.set_defaults(input=128, mem_fraction=0.85)
    arguments = parse(parser)
    if OURS not in arguments.kinds:
        parser.error(
            f"--kinds {' '.join(arguments.kinds)}: expected {OURS} among them, which every claim is about"
        )
    if arguments.add and not arguments.out.exists():
        parser.error(f"--add: expected rounds in --out {arguments.out}, which does not exist; leave --add out")
    kept = json.loads(arguments.out.read_text()) if arguments.add else {}
    figures: Figures = kept.get("figures", {})
    fits: dict[str, list[int]] = kept.get("running_requests", {})
    asked = forced(arguments.fixed)
    most = max(arguments.requests)
    tokens = most * (arguments.input + int((1 + SPREAD) * arguments.output) + 2 * BLOCK)
    load = Load(1, 1, arguments.input, arguments.output, token_ids=range(*arguments.token_ids))
    lengths = {str(width): round(mean_length([PROFILE], width), 3) for width in sorted({BLOCK, *arguments.fixed})}
    status = 1
    begun = max(map(len, fits.values()), default=0)
    with signals_as_exit(), tempfile.TemporaryDirectory() as scratch:
        for turn in range(begun, begun + arguments.rounds):
            for kind in rotated(arguments.kinds, turn):
                one = candidate(kind, (), PROFILE)
                with server_of(one, arguments, Path(scratch), requests=most, tokens=tokens) as server:
                    wait_for(kind, server)
                    [state] = server.get("/server_info")["internal_states"]
                    fits.setdefault(kind, []).append(state["effective_max_running_requests_per_dp"])
                    names: dict[str, Any] = {kind: None}
                    if kind == OURS:
                        require_served(arguments.fixed, server)
                        names |= asked
                    for requests in arguments.requests:
                        for name in rotated(list(names), turn):
                            of = dataclasses.replace(load, concurrency=requests, custom_params=names[name])
                            found = measure(server, name, of, arguments.seconds)
                            add(figures, requests, name, found)
                            print(requests, name, found, flush=True)
                status = report.finish(  # what is there, should the rest not come
                    "bench.recurrent",
                    arguments.out,
                    claims(figures, [*arguments.kinds, *asked]),
                    figures=figures,
                    running_requests=fits,
                    accept_lengths=lengths,
                )
    return status


if __name__ == "__main__":
    sys.exit(main())
