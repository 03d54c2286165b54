"""Tokens per second of the width policy, paired: beside no speculation, the built-in worker, every other width.

python -m bench.widths --target DIR --draft DIR --out FILE [--acceptance good | recorded | recorded_mixed]
                       [--concurrency 1 8 32 64 128 256] [--fixed 16 12 8 6 4 2] [--rounds 3] [--seconds 5]
                       [--trees 16 32] [--alike]

Acceptance is forced by position (`ACCEPTANCE`), the same at every width; the built-in worker, which knows no
positions, gets the accept length that this is at its own width. `recorded` forces what the trained pair's draft
said and had accepted (`bench.record`), on the built-in worker too (`bench.coins`). In `recorded_mixed` half of the
requests have the easiest texts of this record, the others the hardest.

All servers are up at once and take turns. A load is a steady one (`bench.steady`): requests of different lengths
come and go, and their prefills are part of what is measured, on every server.

`--fixed`: loads of the policy's server whose requests ask for one width (`ours_8`), as `min_width` and as
`max_width`; that server's `highest_min_width` allows it. Two things tell such a width from a server's: its graphs
are those of fewer batch sizes, and each step is still asked for.

The policy learns from all loads of its server, step times of widths among it that it would seldom try. Its choice
is its own: before each of its measured loads it has one that is not measured. The built-in worker
has all rounds, too; of the others those that are far from their best in the first round have no other.

`--built-in-flags`, `--over-built-in`: more flags of the built-in worker, which serves some drafts under another
algorithm, and the ratios that are wanted of it.

`--trees`: numbers of nodes that ours may choose; each has a server of its own, too, that always
verifies such trees (`ours_tree_16`). `--alike`: a server of ours whose draft and head have the number formats of
the built-in worker's (`ours_alike`).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import operator
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.load import Load, Outcome
from bench.servers import Candidate, add_options, parse, together
from bench.steady import take_turns, watch
from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit
from dflash_sglang.settings.plugin_config import CONFIG_ENV, FORCED_ENV

BLOCK = 16
# P(proposal 1, 2, ... is accepted once those before it are), of requests of each kind in turn.
ACCEPTANCE: Mapping[str, Sequence[Sequence[float]]] = {
    "good": [[0.866] * 7 + [0.819] * 8],  # accept length 6.4 at 16, 5.1 at 8, 3.2 at 4
    "poor": [[1 / 3] * 15],  # 1.5
}
RECORDED, MIXED, PAIR_RECORD = "recorded", "recorded_mixed", Path(__file__).parent / "records" / "pair.npz"
# Of the best other server but the built-in worker.
BEST = {"good": 0.97, "poor": 0.97, RECORDED: 0.98, MIXED: 1.15}
OVER_BUILT_IN = {"1": 1.25, "8": 1.15, "32": 1.4, "64": 1.6, "128": 1.75}  # recorded; 0.97 elsewhere
OVER_BUILT_IN_FP8 = {"1": 1.6, "8": 1.15, "32": 1.4, "64": 1.65, "128": 1.75}  # recorded, with an fp8 target
ALIKE = f"{OURS}_alike"


def mean_length(acceptance: Sequence[Sequence[float]], width: int) -> float:
    """Accept length at a width, averaged over the kinds of requests."""
    survive = [itertools.accumulate(profile[: width - 1], operator.mul) for profile in acceptance]
    return 1 + sum(map(sum, survive)) / len(acceptance)


def easy_and_hard(record: AcceptanceRecord) -> AcceptanceRecord:
    """A quarter of the texts, those with the longest accept length, then the quarter with the shortest. Requests
    start all over a record and read on: half of them have easy texts for as long as an answer lasts."""
    texts = range(int(record.prompts.max()) + 1)
    order = sorted(texts, key=lambda text: -record.accepted[record.prompts == text].mean())
    chosen = [*order[: len(order) // 4], *order[-(len(order) // 4) :]]
    starts = np.concatenate([np.flatnonzero(record.prompts == text) for text in chosen])
    return AcceptanceRecord(*(array[starts] for array in record))


def record_of(acceptance: str, directory: Path) -> Path | None:
    """The file of `recorded` or `recorded_mixed`, the latter written to `directory`; None for any other."""
    if acceptance != MIXED:
        return PAIR_RECORD if acceptance == RECORDED else None
    path = directory / "easy_and_hard.npz"
    np.savez_compressed(path, **easy_and_hard(AcceptanceRecord.load(PAIR_RECORD))._asdict())
    return path


def candidates_of(arguments: argparse.Namespace, record: Path | None = None) -> list[Candidate]:
    """Ours, those of the other kinds, one for each tree, and for `--alike`. record: forces acceptance, instead of
    `ACCEPTANCE`."""
    acceptance: Any = ACCEPTANCE[arguments.acceptance] if record is None else {"record": str(record)}

    def ours(name: str, flags: tuple[str, ...] = (), **settings: Any) -> Candidate:
        environment = {FORCED_ENV: json.dumps(acceptance), CONFIG_ENV: json.dumps({"copy": "off", **settings})}
        return Candidate(name, OURS, flags, environment, accept_length=0)

    asked_for: dict[str, Any] = {"highest_min_width": BLOCK}  # by the requests of `forced`
    if arguments.trees:
        asked_for["trees"] = arguments.trees
    found = [ours(OURS, width=asked_for)]
    if PLAIN in arguments.kinds:
        found.append(Candidate(PLAIN, PLAIN))
    if BUILT_IN in arguments.kinds and record is not None:
        found.append(with_coins(BUILT_IN, tuple(arguments.built_in_flags), acceptance))
    elif BUILT_IN in arguments.kinds:
        length = round(mean_length(acceptance, BLOCK), 3)
        found.append(Candidate(BUILT_IN, BUILT_IN, tuple(arguments.built_in_flags), accept_length=length))
    found += [ours(f"{OURS}_tree_{nodes}", width=f"tree {nodes}") for nodes in arguments.trees]
    if arguments.alike:  # an fp8 target's draft is fp8 on both sides
        dense = () if "fp8" in arguments.flags else ("--speculative-draft-model-quantization", "unquant")
        found.append(ours(ALIKE, dense, width={}, draft_head="as_is"))
    return [dataclasses.replace(candidate, gpus=arguments.gpus) for candidate in found]


def with_coins(name: str, flags: tuple[str, ...], acceptance: Any) -> Candidate:
    """The built-in worker with acceptance that `bench.coins` forces, as in ours."""
    forced = {FORCED_ENV: json.dumps(acceptance)}
    return Candidate(name, BUILT_IN, flags, forced, accept_length=0, program=("-m", "bench.coins"))


def forced(widths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """{name: custom_params} of requests whose steps have one of these widths."""
    return {f"{OURS}_{width}": {"dflash": {"min_width": width, "max_width": width}} for width in widths}


def require_served(widths: Sequence[int], server: Server) -> None:
    """Raises ValueError if this server chooses among others than these widths."""
    served = [int(width) for width in told(server)["steps"]]
    missing = [width for width in widths if width not in served]
    if missing:
        raise ValueError(
            f"--fixed {' '.join(map(str, missing))}: expected widths that the policy's server has, "
            f"{' '.join(map(str, served))}; its log says what was left out for lack of memory. Leave these out, "
            "or lower --mem-fraction."
        )


def measure(
    servers: Mapping[str, Server],
    load: Load,
    rounds: int,
    seconds: float,
    custom_params: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, list[Any]]]:
    """{name: {figure: [one value per round]}} of one load; custom_params: of loads of our server under names of
    their own. Of ours there is `by_width`, too: steps, and those among them that were probes, ramps included."""
    everyone = {**servers, **dict.fromkeys(custom_params, servers[OURS])}
    of_widths: dict[str, list[Any]] = {}

    def measured(name: str, server: Server, load: Load) -> Outcome:
        if not name.startswith(OURS):
            return watch(server, load, seconds)
        before = told(server)
        outcome = watch(server, load, seconds)
        of_widths.setdefault(name, []).append(since(before, told(server)))
        print(load.concurrency, name, of_widths[name][-1], flush=True)
        return outcome

    loads = {name: dataclasses.replace(load, custom_params=custom_params.get(name)) for name in everyone}
    settled = [OURS] if custom_params else []
    found: dict[str, Any] = take_turns(everyone, loads, rounds, measured, settled, kept=[OURS, BUILT_IN, ALIKE])
    for name, rounds_of in of_widths.items():
        found[name]["by_width"] = rounds_of
    return found


def told(server: Server) -> dict[str, Any]:
    """What a server tells of its widths."""
    [state] = server.get("/server_info")["internal_states"]
    return state["dflash_width"]


def since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[int]]:
    """{width: [steps, probes among them]} of the widths that steps had."""
    grown = {
        width: [now[figure][width] - before[figure][width] for figure in ("steps", "probes")]
        for width in now["steps"]
    }
    return {width: of_width for width, of_width in grown.items() if of_width[0]}


def claims(
    acceptance: str, figures: Mapping[str, Any], fp8: bool = False, wanted: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Our tokens per second over those of the best of the others, and over the built-in worker's. fp8: of the
    target; wanted: over the built-in worker's, by concurrency, instead of what there is for a record."""
    out = []
    usual: Mapping[str, float] = {}
    if acceptance == RECORDED:
        usual = OVER_BUILT_IN_FP8 if fp8 else OVER_BUILT_IN
    bounds = wanted or usual
    for concurrency, servers in figures.items():
        rate = {name: statistics.median(figure["tokens_per_second"]) for name, figure in servers.items()}
        ours, built_in = rate.pop(OURS), rate.pop(BUILT_IN, None)
        load = f"{acceptance} acceptance, concurrency {concurrency}: tokens/s"
        where = f"{load} over"
        alike = rate.pop(ALIKE, None)
        if rate:
            best = max(rate, key=rate.__getitem__)
            what = f"{where} those of the best other server, {best}, medians of rounds"
            out.append(report.at_least(what, round(ours / rate[best], 4), BEST[acceptance]))
        if built_in is not None:
            what = f"{where} the built-in worker's, medians of rounds"
            out.append(report.at_least(what, round(ours / built_in, 4), bounds.get(concurrency, 0.97)))
        if built_in is not None and alike is not None:
            what = f"{load} in the same number formats over the built-in worker's, medians of rounds"
            out.append(report.at_least(what, round(alike / built_in, 4), 1.0))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS, PLAIN, BUILT_IN], accept_length=1.0)
    parser.add_argument("--acceptance", choices=[*ACCEPTANCE, RECORDED, MIXED], default="good")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--fixed", type=int, nargs="*", default=[16, 12, 8, 6, 4, 2], help="widths")
    parser.add_argument("--trees", type=int, nargs="+", default=[], help="nodes of trees that ours may choose")
    parser.add_argument("--alike", action="store_true", help="a server of ours in the built-in worker's formats")
    parser.add_argument("--gpus", help="of the servers, as in CUDA_VISIBLE_DEVICES; all by default")
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer, on average")
    parser.add_argument("--presence-penalty", type=float, default=0.0, help="of every request")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a load that are measured")
    parser.add_argument("--built-in-flags", type=shlex.split, default=[], help="more of that worker, one string")
    parser.add_argument("--over-built-in", nargs="+", default=[], metavar="CONCURRENCY=RATIO", help="wanted")
    arguments = parse(parser)
    wanted = {at: float(ratio) for at, _, ratio in (pair.partition("=") for pair in arguments.over_built_in)}
    asked = forced(arguments.fixed)
    most = max(arguments.concurrency)
    # Of a request in a steady load 0.54 of its output is there on average, and as much is still to come, for which
    # SGLang keeps room.
    tokens = int(most * (arguments.input + 1.15 * arguments.output + 2 * BLOCK + 16)) + 4 * arguments.output
    figures: dict[str, Any] = {}
    status = 1
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_as_exit())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        candidates = candidates_of(arguments, record_of(arguments.acceptance, scratch))
        servers = stack.enter_context(together(candidates, arguments, requests=most, tokens=tokens))
        require_served(arguments.fixed, servers[OURS])
        load = Load(
            *(1, 1, arguments.input, arguments.output),
            presence_penalty=arguments.presence_penalty,
            token_ids=range(*arguments.token_ids),
        )
        for concurrency in arguments.concurrency:
            of = dataclasses.replace(load, concurrency=concurrency)
            figures[str(concurrency)] = measure(servers, of, arguments.rounds, arguments.seconds, asked)
            claimed = claims(arguments.acceptance, figures, fp8="fp8" in arguments.flags, wanted=wanted)
            # What is there, should the next concurrency not come.
            status = report.finish("bench.widths", arguments.out, claimed, figures=figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
