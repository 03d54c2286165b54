"""Contexts of 32k and 128k tokens on one GPU: step time with and without a window on the draft, and accept length.

python -m bench.long_128k --target DIR --draft DIR --out FILE [--lengths 32000 130000] [--window 4096]
                          [--settings none@128 1024@128 1024] [--pair-lengths 32768 131072]

Step time: our servers of random weights (`dflash_sglang.bench.random_pair`), forced acceptance, one request at a
time whose prompt is in the prefix cache; its prefill is timed once. Accept length: the trained pair after held-out
text, settings as in `bench.long_context`. The pair was trained on 1024 positions, so YaRN stretches them, and its
accept length tells working from not working only.

All servers start at once; those of the pair end before a step is timed. In Qwen3-8B's shapes the two others need
85 GB. A pair of fewer layers (`dflash_sglang.bench.random_pair DIR --layers 12 --config-only`) fits an H100.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import long_context, report
from bench.load import Load, ask
from bench.servers import Candidate, add_options, parse, server_of
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, wait_for
from dflash_sglang.demo.server import Server
from dflash_sglang.demo.signals import signals_as_exit

BLOCK_TOKENS = 64  # room for the blocks past the end of an answer
PROMPTS = 2  # of the pair, at each length


def candidates(window: int, context: int) -> list[Candidate]:
    longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    flags = ("--context-length", str(context))
    windowed = ("--speculative-draft-window-size", str(window))
    return [
        Candidate("no window", OURS, flags, longer),
        Candidate("window", OURS, (*flags, *windowed), longer),
    ]


def steps_of(server: Server, load: Load, rounds: int) -> dict[str, Any]:
    """The first answer prefills; the others find their prompt in the prefix cache."""
    start = time.perf_counter()
    first = ask(server, load)
    prefilled = first[0].first - start
    answers = [answer for _ in range(rounds) for answer in ask(server, load)]
    step_ms = [1000 * (answer.last - answer.first) / answer.verify_steps for answer in answers]
    return {
        "seconds_to_the_first_token_cold": round(prefilled, 2),
        "step_ms": [round(value, 4) for value in step_ms],
        "accept_length": round(
            sum(answer.tokens - 1 for answer in answers) / sum(answer.verify_steps for answer in answers), 3
        ),
        "answers": sum(answer.tokens == load.output_tokens for answer in [*first, *answers]),
    }


def accept_lengths(servers: Mapping[str, Server], lengths: Sequence[int]) -> dict[str, Any]:
    """{setting: {length: figures}} of the pair's servers, once they are ready."""

    def measured(server: Server) -> dict[str, Any]:
        wait_for(OURS, server)
        return {
            str(length): long_context.decode(
                server, long_context.prompts_of(length - long_context.NEW_TOKENS, PROMPTS)
            )
            for length in lengths
        }

    with ThreadPoolExecutor(len(servers)) as pool:
        return dict(zip(servers, pool.map(measured, servers.values()), strict=True))


def claims_of(figures: Mapping[str, Any], accepted: Mapping[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Every answer came whole, a window costs no step time, and the pair accepts some proposals."""
    out = []
    for length, by_server in figures.items():
        answers = sum(of_server["answers"] for of_server in by_server.values())
        asked = len(by_server) * (1 + rounds)
        what = f"whole answers after {length} tokens"
        out.append(report.claim(what, answers, f"= {asked}", answers == asked))
        with_window, without = (statistics.median(by_server[name]["step_ms"]) for name in ("window", "no window"))
        what = f"step time with a window over none after {length} tokens"
        out.append(report.at_most(what, round(with_window / without, 4), 1.02))
    for setting, by_length in accepted.items():
        if "@" in setting:
            for length, of_length in by_length.items():
                what = f"new tokens a step of the pair, {setting}, {length} tokens"
                out.append(report.at_least(what, of_length["new_tokens_after_the_first_per_step"], 1.2))
    return out


def main() -> int:
    parser = script_parser(__doc__)
    add_options(parser, [OURS], accept_length=6.4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32_000, 130_000])
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--settings", nargs="*", default=["none@128", "1024@128", "1024"], help="of the pair")
    parser.add_argument("--pair-lengths", type=int, nargs="+", default=[32_768, 131_072])
    parser.set_defaults(mem_fraction=0.95)  # of servers that start together
    arguments = parse(parser)
    # Both prompts stay in the cache.
    context = max(arguments.lengths) + arguments.output + BLOCK_TOKENS
    tokens = sum(arguments.lengths) + len(arguments.lengths) * (arguments.output + BLOCK_TOKENS)
    of_pair = max(arguments.pair_lengths) + 512
    with signals_as_exit(), tempfile.TemporaryDirectory() as directory, ExitStack() as running:
        scratch = Path(directory)
        of_shapes = {
            one.name: running.enter_context(server_of(one, arguments, scratch, requests=1, tokens=tokens))
            for one in candidates(arguments.window, context)
        }
        accepted: dict[str, Any] = {}
        if arguments.settings:
            with ExitStack() as pairs:
                servers = {
                    setting: pairs.enter_context(
                        long_context.server_of(
                            setting, of_pair, arguments.device, scratch, mem_fraction=arguments.mem_fraction
                        )
                    )
                    for setting in arguments.settings
                }
                accepted = accept_lengths(servers, arguments.pair_lengths)
        for server in of_shapes.values():
            wait_for(OURS, server)
        figures: dict[str, Any] = {}
        status = 1
        for length in arguments.lengths:
            load = Load(1, 1, length, arguments.output, token_ids=range(*arguments.token_ids))
            figures[str(length)] = {
                name: steps_of(server, load, arguments.rounds) for name, server in of_shapes.items()
            }
            print(length, figures[str(length)], flush=True)
            # What is there, should the next length not come.
            claims = claims_of(figures, accepted, arguments.rounds)
            status = report.finish(
                "bench.long_128k",
                arguments.out,
                claims,
                figures=figures,
                accept_length_of_the_pair=accepted,
                trained_length=long_context.TRAINED,
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
