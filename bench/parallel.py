"""Tokens per second on several GPUs, paired: this package's worker, the built-in one and no speculation.

python -m bench.parallel --out FILE [--layouts tp2 dpa2] [--gpus 0,1] [--concurrency 1 16 64] [--rounds 3]
                         [--also 16:1021] [--profile 16]

One layout after the other (`bench.layouts`): tensor parallel in the shapes of Qwen3-8B, data-parallel attention in
those of Qwen3-30B-A3B, over a recurrent target in those of Qwen3.5-9B (`dflash_sglang.bench.random_pair`; the
target's weights are SGLang's own random ones, so that nothing large is written and read). The three servers of a
layout are up at once on the same GPUs and take turns, each round in another order; one alone has requests.
Acceptance is forced to a whole number of tokens, so that no draw of accept lengths stands between two figures.
`--also` adds loads of other output lengths, `--profile` takes a step of each speculating server apart.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import report
from bench.cluster import Cluster, memory_of, stop_on_sigterm, stop_together
from bench.layouts import LAYOUTS, PORTS_PER_LAYOUT, PORTS_PER_SERVER, Layout
from bench.load import Load, take_turns
from bench.servers import environment_of
from bench.step_profile import MARGIN, figures_of
from dflash_sglang.bench import profile
from dflash_sglang.bench.random_pair import write_pair
from dflash_sglang.bench.script import script_parser
from dflash_sglang.bench.settings import PROFILED_TOKENS
from dflash_sglang.demo.launch import BUILT_IN, ON_CPU, OURS, PLAIN, model_flags
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import free_port

KINDS = (OURS, BUILT_IN, PLAIN)
# Of the others: experts, for which one has such attention.
SHAPE_OF = {"tp2": "qwen3-8b", "tp4": "qwen3-8b", "dpa2_recurrent": "hybrid-9b"}
DUMMY = ["--load-format", "dummy"]
DUMMY_DRAFT = ["--speculative-draft-load-format", "auto"]

GOAL, GOAL_AT = 1.3, "16"  # of data-parallel attention: the built-in worker drafts without graphs there
STEP = {("tp2", "32"): 0.90}  # bound of our step time over the built-in worker's, by layout and concurrency
NEVER_BELOW = 0.99  # rounds of one server differ by about a percent


def servers_of(
    layout: Layout, pair: Mapping[str, str], arguments: argparse.Namespace, port: int, scratch: Path
) -> dict[str, Cluster]:
    """The servers of a layout by kind, not started yet."""
    most = max([*(at for at, _ in loads_of(arguments)), *arguments.profile])
    flags = [
        "--skip-tokenizer-init", "--log-level-http", "warning",
        "--min-free-slots-delay", "1",
        # Of all ranks together; any one of them may get all requests.
        "--max-running-requests", str(most * layout.replicas), "--cuda-graph-max-bs-decode", str(most),
        "--max-total-tokens", str(tokens_at_once(arguments)),
        "--mem-fraction-static", str(arguments.mem_fraction), *arguments.flags,
    ]  # fmt: skip
    draft_flags: list[str] = []
    if arguments.pair is None:
        flags, draft_flags = flags + DUMMY, DUMMY_DRAFT
    if arguments.device == "cpu":
        flags += ON_CPU
    return {
        kind: Cluster(
            layout,
            kind,
            [*model_flags(kind, pair["target"], pair["draft"], draft_flags), *flags],
            port + i * PORTS_PER_SERVER,
            environment_of(
                kind,
                arguments.device == "cpu",
                arguments.gpus,
                SGLANG_SIMULATE_ACC_LEN=str(arguments.accept_length),
            ),
            arguments.logs or scratch,
        )
        for i, kind in enumerate(arguments.kinds)
    }


def start(servers: Mapping[str, Cluster]) -> None:
    """Starts all servers, ours first: while it loads its weights nothing else takes memory, so that its log tells
    how much they take."""
    for kind, server in servers.items():
        server.start()
        if kind == OURS:
            server.wait_loaded()
    for server in servers.values():
        server.wait_ready()


def loads_of(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """(concurrency, output tokens)"""
    return [*((at, arguments.output) for at in arguments.concurrency), *arguments.also]


def tokens_at_once(arguments: argparse.Namespace) -> int:
    """That the pools have to hold, MARGIN tokens beside each request's."""
    loads = loads_of(arguments) + [(at, PROFILED_TOKENS) for at in arguments.profile]
    return max(at * (arguments.input + output + MARGIN) for at, output in loads)


def measure(
    servers: Mapping[str, Cluster], concurrency: int, output: int, arguments: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """{kind: {figure: [one value per round]}}"""
    load = Load(
        concurrency,
        2 * concurrency,
        arguments.input,
        output,
        token_ids=range(*arguments.token_ids),
        waves=True,
    )
    return take_turns({kind: server.head for kind, server in servers.items()}, load, arguments.rounds)


def take_apart(
    servers: Mapping[str, Cluster], concurrency: int, arguments: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """{kind: a step of its first rank, as `bench.step_profile` has them}"""
    prompts = Load(concurrency, concurrency, arguments.input, token_ids=range(*arguments.token_ids)).prompts()
    requests, progress = [{"input_ids": prompt} for prompt in prompts], Progress(sys.stdout)
    return {
        kind: figures_of([profile.take_apart(server.head, kind, requests, scratch / f"trace_{kind}", progress)])
        for kind, server in servers.items()
        if kind != PLAIN
    }


def claims(layout: str, figures: Mapping[str, Any], accept_length: float) -> list[dict[str, Any]]:
    """Our tokens per second over the built-in worker's at every concurrency, and the forced accept length."""
    out = []
    for concurrency, kinds in figures.items():
        if not {OURS, BUILT_IN} <= set(kinds):
            continue
        rates = [kinds[kind]["tokens_per_second"] for kind in (OURS, BUILT_IN)]
        ratio = statistics.median(ours / other for ours, other in zip(*rates, strict=True))
        goal = GOAL if layout.startswith("dpa") and concurrency.split(":")[0] == GOAL_AT else NEVER_BELOW
        what = f"{layout}: tokens/s over the built-in worker's at concurrency {concurrency}, median of rounds"
        out.append(report.at_least(what, round(ratio, 4), goal))
        if (layout, concurrency) in STEP:
            steps = [statistics.median(kinds[kind]["step_ms"]) for kind in (OURS, BUILT_IN)]
            what = f"{layout}: step time over the built-in worker's at concurrency {concurrency}, medians"
            out.append(report.at_most(what, round(steps[0] / steps[1], 4), STEP[layout, concurrency]))
        lengths = [length for kind in (OURS, BUILT_IN) for length in kinds[kind]["accept_length"]]
        ok = all(abs(length / accept_length - 1) <= 0.02 for length in lengths)
        what = f"{layout}: accept lengths of both workers at concurrency {concurrency}"
        out.append(report.claim(what, [min(lengths), max(lengths)], f"within 2% of {accept_length}", ok))
    return out


def concurrency_and_output(text: str) -> tuple[int, int]:
    concurrency, output = text.split(":")
    return int(concurrency), int(output)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=["tp2", "dpa2"])
    parser.add_argument("--gpus", help="of the servers, as in CUDA_VISIBLE_DEVICES; all by default")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--accept-length", type=float, default=6.0)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=253, help="tokens of an answer: the first and whole steps")
    parser.add_argument(
        "--also", type=concurrency_and_output, nargs="+", default=[], help="more loads: concurrency:output"
    )
    parser.add_argument("--profile", type=int, nargs="+", default=[], help="concurrency of steps to take apart")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--port", type=int, help="of the first server; each layout uses 600 ports from there on")
    parser.add_argument("--mem-fraction", type=float, default=0.85)
    parser.add_argument("--pair", type=Path, help="directory with target and draft, in place of random ones")
    parser.add_argument(
        "--token-ids", type=int, nargs=2, default=[1000, 100_000], help="of prompts, from and below"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of every server, one string")
    parser.add_argument("--logs", type=Path, help="directory that keeps the servers' logs")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    memory: dict[str, Any] = {}
    profiles: dict[str, Any] = {}
    results = dict(figures=figures, memory_of_ours=memory, profiles=profiles)
    status = 1
    for i, name in enumerate(arguments.layouts):
        layout, shape = LAYOUTS[name], SHAPE_OF.get(name, "qwen3-30b-a3b")
        port = arguments.port + i * PORTS_PER_LAYOUT if arguments.port else free_port()
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            pair = (
                {role: str(arguments.pair / role) for role in ("target", "draft")}
                if arguments.pair
                else write_pair(scratch, shape, config_only=True)
            )
            servers = servers_of(layout, pair, arguments, port, scratch)
            stop_on_sigterm(servers.values())
            try:
                start(servers)
                memory[name] = memory_of(servers[OURS].log_text()) if OURS in servers else {}
                figures[name] = {}
                for concurrency, output in loads_of(arguments):
                    # As loads are told apart: by their output too where it is not the usual one.
                    at = str(concurrency) if output == arguments.output else f"{concurrency}:{output}"
                    figures[name][at] = measure(servers, concurrency, output, arguments)
                    claimed = [c for at, of in figures.items() for c in claims(at, of, arguments.accept_length)]
                    # What is there, should the next load or layout not come.
                    status = report.finish("bench.parallel", arguments.out, claimed, **results)
                for concurrency in arguments.profile:
                    steps = profiles.setdefault(name, {})
                    steps[concurrency] = take_apart(servers, concurrency, arguments, scratch)
                    report.finish("bench.parallel", arguments.out, claimed, **results)
            except (OSError, RuntimeError):
                for kind, server in servers.items():
                    print(kind, *server.log_tail(), sep="\n", file=sys.stderr)
                raise
            finally:
                stop_together(servers.values())
    return status


if __name__ == "__main__":
    sys.exit(main())
