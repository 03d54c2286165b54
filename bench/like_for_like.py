"""Tokens per second like for like: weights in the same formats on both sides, the same acceptance, steady loads.

python -m bench.like_for_like --target DIR --draft DIR --out FILE [--groups defaults dense fp8 fp8_target]
                              [--acceptance good | poor] [--concurrency 1 8 32 64 128] [--rounds 3]
                              [--seconds 3.5 | --seconds 5 5 3 3 3] [--profile 8] [--whole 32 64 128]

Servers of a group (`GROUPS`) are up at once and take turns. Acceptance is forced by position, the same on every
server: a coin of each request decides, for the built-in worker in `bench.coins`. A load is a steady one
(`bench.steady`). `ours_..._16` is a load of our server whose requests ask for the block's width, with
`--whole` at those concurrencies only: with few requests a server chooses this width itself (`by_width`).

`by_steps`: tokens per second that a server's step time gives at the accept length that its coins have in the long
run. A few requests toss few coins in a round, so that their tokens vary by percents and their steps do not.

A claim compares one round of one group: the worst of the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.load import Load, by_figure
from bench.servers import Candidate, add_options, parse, together
from bench.steady import WARM_UP, occupy, watch
from bench.step_profile import figures_of, of_concurrency
from bench.widths import ACCEPTANCE, BLOCK, forced, mean_length, since, told, with_coins
from dflash_sglang.bench.load import rotated
from dflash_sglang.bench.script import script_parser
from dflash_sglang.bench.table import step_table
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit
from dflash_sglang.settings.plugin_config import CONFIG_ENV, FORCED_ENV

DRAFT = "--speculative-draft-model-quantization"
FORMATS: Mapping[str, Sequence[str]] = {"dense": (DRAFT, "unquant"), "fp8": (DRAFT, "fp8")}
WHOLE = f"_{BLOCK}"  # of the block's width


@dataclasses.dataclass(frozen=True)
class Group:
    """Servers that are up at once: three or four of a target of 16 GB fit an H200. ``target``: flags of all."""

    servers: Sequence[str]
    target: Sequence[str] = ()


# By default the built-in worker's draft has the target's quantisation: none, or fp8 with the last group's target.
GROUPS: Mapping[str, Group] = {
    "defaults": Group((PLAIN, BUILT_IN, OURS)),
    "dense": Group((f"{BUILT_IN}_dense", f"{OURS}_dense")),
    "fp8": Group((f"{BUILT_IN}_fp8", f"{OURS}_fp8")),
    "fp8_target": Group((PLAIN, BUILT_IN, f"{OURS}_fp8", OURS), ("--quantization", "fp8")),
}


def candidate(name: str, target: Sequence[str], profile: Sequence[float]) -> Candidate:
    """One server of a group. A format in our name also keeps our head as it is."""
    kind = next(kind for kind in (PLAIN, BUILT_IN, OURS) if name.startswith(kind))
    form = name.removeprefix(kind).removeprefix("_")
    flags = (*target, *FORMATS.get(form, ()))
    if kind == BUILT_IN:
        return with_coins(name, flags, profile)
    settings: dict[str, Any] = {"copy": "off", "width": {"highest_min_width": BLOCK}}
    if form:
        settings["draft_head"] = "as_is"
    environment = {FORCED_ENV: json.dumps(profile), CONFIG_ENV: json.dumps(settings)} if kind == OURS else {}
    return Candidate(name, kind, flags, environment, accept_length=0)


def names_of(servers: Sequence[str], whole: bool) -> dict[str, str]:
    """{load: its server}, each of ours with the width that it chooses and, if `whole`, with the block's."""
    found = {name: name for name in servers}
    for name in servers:
        if whole and name.startswith(OURS):
            found[name + WHOLE] = name
    return found


def measure(
    servers: Mapping[str, Server],
    load: Load,
    rounds: int,
    seconds: float,
    profile: Sequence[float],
    whole: bool = True,
) -> dict[str, dict[str, list[Any]]]:
    """{name: {figure: [one value per round]}} of one concurrency."""
    [(_, of_block)] = forced([BLOCK]).items()
    names = names_of(list(servers), whole)
    found: dict[str, list[Any]] = {name: [] for name in names}
    by_width: dict[str, list[Any]] = {name: [] for name in names if name.startswith(OURS)}
    for turn in range(rounds):
        for name in rotated(list(names), turn):
            server = servers[names[name]]
            asked = dataclasses.replace(load, custom_params=of_block if name.endswith(WHOLE) else None)
            before = told(server) if name in by_width else None
            found[name].append(watch(server, asked, seconds))
            if before is not None:
                by_width[name].append(since(before, told(server)))
            print(load.concurrency, name, found[name][-1], flush=True)
    figures: dict[str, dict[str, list[Any]]] = {name: by_figure(of) for name, of in found.items()}
    for name, widths in by_width.items():
        figures[name]["by_width"] = widths
    for name, of in figures.items():
        of["by_steps"] = [
            round(1000 * load.concurrency * expected_length(name, of, turn, profile) / step, 1)
            for turn, step in enumerate(of["step_ms"])
        ]
    return figures


def expected_length(name: str, figures: Mapping[str, Sequence[Any]], turn: int, profile: Sequence[float]) -> float:
    """Accept length that the coins have in the long run, by the widths of a round's steps."""
    if name == PLAIN:
        return 1.0
    if "by_width" not in figures:
        return mean_length([profile], BLOCK)
    steps = {int(width): of[0] for width, of in figures["by_width"][turn].items()}
    return sum(mean_length([profile], width) * count for width, count in steps.items()) / sum(steps.values())


def others(name: str, group: Group) -> list[str]:
    """Of our load, the servers that it is compared with. The block's width has nothing to gain where it is wider
    than what pays, so it is compared with the built-in worker alone, which always has it."""
    form = name.removesuffix(WHOLE).removeprefix(OURS)
    built_in = f"{BUILT_IN}{form}" if f"{BUILT_IN}{form}" in group.servers else BUILT_IN
    compared = [built_in, *([] if name.endswith(WHOLE) else [PLAIN])]
    return [one for one in group.servers if one in compared]


def claims(group: str, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Our tokens per second over those of the others of a group, by their steps: no round is below 1."""
    out = []
    for concurrency, of in figures.items():
        for name in of:
            if not name.startswith(OURS):
                continue
            for other in others(name, GROUPS[group]):
                pairs = zip(of[name]["by_steps"], of[other]["by_steps"], strict=True)
                worst = round(min(ours / theirs for ours, theirs in pairs), 4)
                what = f"{group}, concurrency {concurrency}: tokens/s of {name} over {other}, worst round"
                out.append(report.at_least(what, worst, 1.0))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS, PLAIN, BUILT_IN], accept_length=0)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--acceptance", choices=["good", "poor"], default="good")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--output", type=int, default=512, help="tokens of an answer, on average")
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[3.5], help="of a load that are measured, one or one each"
    )
    parser.add_argument(
        "--whole", type=int, nargs="+", help="concurrency of loads of the block's width, all by default"
    )
    parser.add_argument("--max-tokens", type=int, help="of a KV pool")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="concurrency of steps to take apart")
    arguments = parse(parser)
    seconds = arguments.seconds * (len(arguments.concurrency) if len(arguments.seconds) == 1 else 1)
    if len(seconds) != len(arguments.concurrency):
        parser.error(f"--seconds {arguments.seconds}: expected one, or one for each --concurrency")
    most = max([*arguments.concurrency, *arguments.profile])
    # Of an answer in a steady load 0.54 is there on average. A profile's requests are all there at once.
    tokens = arguments.max_tokens or int(most * (arguments.input + 0.7 * arguments.output + 2 * BLOCK))
    [profile] = ACCEPTANCE[arguments.acceptance]
    load = Load(1, 1, arguments.input, arguments.output, token_ids=range(*arguments.token_ids))
    figures: dict[str, Any] = {}
    profiles: dict[str, Any] = {}
    claimed: list[dict[str, Any]] = []
    status = 1

    def keep() -> int:  # what is there, should the rest not come
        lengths = {str(width): round(mean_length([profile], width), 3) for width in (16, 12, 8, 6, 4, 2, 1)}
        return report.finish(
            "bench.like_for_like", arguments.out, claimed, figures=figures, steps=profiles, accept_lengths=lengths
        )

    with signals_as_exit():
        for number, name in enumerate(arguments.groups):
            group = GROUPS[name]
            candidates = [candidate(one, group.target, profile) for one in group.servers]
            with together(candidates, arguments, requests=most, tokens=tokens, compiled=number > 0) as servers:
                of_group = figures.setdefault(name, {})
                for server in servers.values():
                    occupy(server, dataclasses.replace(load, concurrency=most), WARM_UP)
                before = list(claimed)
                for concurrency, window in zip(arguments.concurrency, seconds, strict=True):
                    of = dataclasses.replace(load, concurrency=concurrency)
                    whole = concurrency in (arguments.whole or arguments.concurrency)
                    of_group[str(concurrency)] = measure(servers, of, arguments.rounds, window, profile, whole)
                    claimed = before + claims(name, of_group)
                    status = keep()
                drafting = {one: server for one, server in servers.items() if one != PLAIN}
                for concurrency in arguments.profile:
                    taken = taken_apart(drafting, concurrency, arguments)
                    profiles.setdefault(name, {})[str(concurrency)] = taken
                    status = keep()
    return status


def taken_apart(servers: Mapping[str, Server], concurrency: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """{server: its step, as `bench.step_profile` has it}, one round."""
    once = argparse.Namespace(**{**vars(arguments), "rounds": 1})
    with tempfile.TemporaryDirectory() as traces:
        rounds = of_concurrency(servers, concurrency, once, Path(traces), Progress(sys.stdout))
    for name, of in rounds.items():
        print(step_table({"server": name, **of[-1]}), flush=True)
    return {name: figures_of(of) for name, of in rounds.items()}


if __name__ == "__main__":
    sys.exit(main())
