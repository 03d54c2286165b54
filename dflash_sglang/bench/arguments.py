"""The options of `dflash-sglang bench`, and what they mean on this machine and for these checkpoints."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench import checkpoints, prompts, sets
from dflash_sglang.bench.checkpoints import Pair
from dflash_sglang.bench.settings import PROFILED_TOKENS, BadSetting, PromptSet, Settings
from dflash_sglang.bench.versions import nvidia_smi
from dflash_sglang.checkpoint.fields import described
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN, environment
from dflash_sglang.pair import held_out_prompts
from dflash_sglang.settings.plugin_config import PluginConfigError

NAMES = {"plain": PLAIN, "built-in": BUILT_IN, "ours": OURS}
HELD_OUT = "held-out prompts"
CHAT = 256  # tokens that a chat template adds at most to a text of --input
RANDOM_INPUT = 256  # tokens of a prompt of random ids
LEAST_TOKENS = 20_000  # of a KV pool
MIB, GIB = 1 << 20, 1 << 30


def add_parser(commands: Any) -> None:
    """`commands`: what `add_subparsers` gave."""
    parser = commands.add_parser(
        "bench",
        help="measure what DFLASH gains: no speculation, SGLang's own worker and this package's",
        description="Serves a target without speculation, with SGLang's built-in DFLASH worker and with this "
        "package's, puts the same load on each, and writes bench.json, bench.md and bench.png.",
    )
    pair = parser.add_argument_group("checkpoints (default: the pair of this package, which also runs on a CPU)")
    pair.add_argument("--target", help="checkpoint directory")
    pair.add_argument("--draft", help="checkpoint directory")
    pair.add_argument("--shapes", help="random weights of these shapes, such as qwen3-8b; needs --accept-length")
    pair.add_argument("--layers", type=int, help="layers of the random target; the shape's own by default")
    sweep = parser.add_argument_group("what is measured; several values are swept")
    sweep.add_argument("--concurrency", type=int, nargs="+", help="requests at a time (1 8 32; on a CPU 1 4)")
    sweep.add_argument("--width", type=int, nargs="+", help="verify widths (the draft's block; ours chooses)")
    sweep.add_argument("--input", type=int, nargs="+", help="tokens of a prompt; texts as they are by default")
    sweep.add_argument("--temperature", type=float, nargs="+", default=[0.0], help="0, greedy, by default")
    sweep.add_argument("--top-p", type=float, default=0.95, help="at temperatures above 0 (default 0.95)")
    sweep.add_argument("--output", type=int, help="tokens of a completion (512; on a CPU 96)")
    sweep.add_argument("--requests", type=int, default=2, help="of a round, for each at a time (default 2)")
    sweep.add_argument("--rounds", type=int, default=3, help="of which the medians are taken (default 3)")
    sweep.add_argument(
        "--prompts",
        nargs="+",
        help=f"each measured by itself: a file with a text a line, a .jsonl file of texts or conversations, or "
        f"{', '.join(sets.DATA_SETS)} (default: prompts that the packaged draft was not trained on)",
    )
    sweep.add_argument("--chat", action="store_true", help="apply the target's chat template to texts of files")
    sweep.add_argument("--accept-length", type=float, help="force it; prompts are random ids, ours has the block")
    sweep.add_argument("--profile", type=int, nargs="*", help="take a step apart at these concurrencies")
    servers = parser.add_argument_group("servers")
    servers.add_argument("--servers", nargs="+", choices=list(NAMES), default=list(NAMES))
    turns = servers.add_mutually_exclusive_group()
    turns.add_argument("--together", action="store_true", help="all up at once, by turns; default where they fit")
    turns.add_argument("--in-turn", action="store_true", help="one after the other")
    servers.add_argument("--mem-fraction", type=float, help="--mem-fraction-static of each (0.7 together)")
    servers.add_argument("--max-total-tokens", type=int, help="of each KV pool; what the load needs by default")
    servers.add_argument("--flags", type=shlex.split, default=[], help="more for each: --flags='--tp-size 2'")
    servers.add_argument("--dflash-flags", type=shlex.split, default=[], help="more for those with DFLASH")
    servers.add_argument("--ours-flags", type=shlex.split, default=[], help="more for this package's")
    parser.add_argument("--out", type=Path, default=Path("dflash-bench"), help="directory (default dflash-bench)")
    parser.add_argument("--redraw", type=Path, metavar="BENCH_JSON", help="measure nothing, draw from this file")


def settings_of(options: argparse.Namespace, gpu: bool, say: Callable[[str], None] = print) -> Settings:
    """The checked settings; writes random weights where asked to. Raises BadSetting."""
    _check_numbers(options)
    forced: float | None = options.accept_length
    if options.shapes is not None and forced is None:
        raise BadSetting(
            f"--shapes {options.shapes}: a random target accepts next to nothing of a random draft; say how much "
            "a step shall accept, such as --accept-length 6.4"
        )
    if forced is not None and (options.prompts or options.chat):
        raise BadSetting(
            f"--accept-length {forced:g}: the texts mean nothing then; leave out --prompts and --chat"
        )
    if options.profile is not None and not gpu:
        raise BadSetting("--profile: takes the kernels of a GPU apart, and this machine has none")
    asked = () if forced is not None else _sets(options)
    given = Flags.of_words([*options.flags, *options.dflash_flags])
    block = max(options.width) if options.width else given.block_size
    pair = checkpoints.find(
        options.target, options.draft, options.shapes, options.layers, options.out, say,
        given._replace(block_size=block),
    )  # fmt: skip
    for one in asked:
        if one.chat:
            checkpoints.check_template(pair.target, "--chat" if options.chat else f"--prompts {one.name}")
    concurrency = tuple(options.concurrency or ((1, 8, 32) if gpu else (1, 4)))
    profile = () if options.profile is None else tuple(options.profile or concurrency[:1])
    widths = tuple(options.width or (pair.spec.block_size,))
    inputs = tuple(options.input or ((RANDOM_INPUT,) if forced is not None else (None,)))
    output = options.output or (512 if gpu else 96)
    _check_widths(widths, forced, pair)
    new = max(output, PROFILED_TOKENS) if profile else output
    context = None if sets_context(options.flags) else pair.context
    longest = max((length or 0) + CHAT for length in inputs) + new
    if None in inputs:
        longest = max(longest, *(_room(one, pair.target, new, context) for one in asked))
    if context and any((n or 0) + new > context for n in inputs):
        raise BadSetting(
            f"--input {max(n or 0 for n in inputs)} and {new} new tokens: expected at most {pair.context} "
            f"together, the context of {pair.target}"
        )
    kinds, skipped = _kinds(options.servers, pair, gpu)
    if OURS in kinds:
        check_config()
    tokens = max((*concurrency, *profile)) * (longest + 2 * max(widths) + 64)
    together, why = _together(
        options, pair, gpu, [kind for kind in kinds for _ in (widths if kind != PLAIN else "-")]
    )
    fraction = options.mem_fraction
    if fraction is None:
        fraction = 0.5 if not gpu else 0.7 if together else None
    return Settings(
        target=pair.target,
        draft=pair.draft,
        vocabulary=pair.vocabulary,
        gpu=gpu,
        kinds=kinds,
        skipped=skipped,
        out=options.out,
        concurrency=concurrency,
        widths=widths,
        chooses=options.width is None and options.profile is None and forced is None,
        inputs=inputs,
        temperatures=tuple(options.temperature),
        top_p=options.top_p,
        output=output,
        requests=options.requests,
        rounds=options.rounds,
        accept_length=forced,
        sets=asked,
        together=together,
        together_reason=why,
        mem_fraction=fraction,
        max_total_tokens=options.max_total_tokens or max(tokens, LEAST_TOKENS),
        flags=tuple(options.flags),
        dflash_flags=tuple(options.dflash_flags),
        ours_flags=tuple(options.ours_flags),
        profile=profile,
    )


def _check_numbers(options: argparse.Namespace) -> None:
    bounds = {
        "concurrency": 1, "width": 2, "input": 1, "temperature": 0, "output": 8, "requests": 1, "rounds": 1,
        "accept_length": 1, "profile": 1, "layers": 4, "max_total_tokens": 1,
    }  # fmt: skip
    for name, least in bounds.items():
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < least:
                raise BadSetting(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    for name in ("top_p", "mem_fraction"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= 1:
            raise BadSetting(f"--{name.replace('_', '-')} {value}: expected more than 0 and at most 1")


def _check_widths(widths: Sequence[int], forced: float | None, pair: Pair) -> None:
    for width in widths:
        if width > pair.spec.block_size:
            raise BadSetting(f"--width {width}: expected 2 to {pair.spec.block_size}, the draft's trained block")
        if forced is not None and forced > width:
            raise BadSetting(f"--accept-length {forced:g}: expected 1 to {width}, the verify width")


def _sets(options: argparse.Namespace) -> tuple[PromptSet, ...]:
    """The sets of prompts, each once. Raises BadSetting."""
    if options.prompts is None:
        texts = tuple(sets.asked([prompt.text]) for prompt in held_out_prompts())
        found = [PromptSet(HELD_OUT, texts, options.chat or options.target is None)]
    else:
        found = [sets.read(value, options.chat) for value in dict.fromkeys(options.prompts)]
    for one in found:
        if options.input and one.conversations:
            raise BadSetting(
                f"--input {options.input[0]}: expected prompts of one text each, and --prompts {one.name} has "
                "conversations; leave one of them out"
            )
    return tuple(found)


def _room(one: PromptSet, target: str, new: int, context: int | None) -> int:
    """The most tokens of a prompt with its answers. Raises BadSetting where they do not fit into the context."""
    from jinja2 import TemplateError

    try:
        longest = prompts.room(one, target, new)
    except (TemplateError, OSError, ValueError) as error:
        raise BadSetting(
            f"--prompts {one.name}: expected what the tokenizer of {target} takes ({described(error)})"
        ) from error
    if context is not None and longest > context:
        raise BadSetting(
            f"--prompts {one.name}: the longest takes {longest} tokens, {new} new ones a turn: expected at most "
            f"{context}, the context of {target}; shorten it or lower --output"
        )
    return longest


def check_config() -> None:
    """Raises BadSetting where DFLASH_SGLANG_CONFIG, which servers inherit, cannot be read."""
    try:
        environment(OURS)
    except PluginConfigError as error:
        raise BadSetting(str(error)) from error


def sets_context(flags: Sequence[str]) -> bool:
    """Whether these flags of a launch say how long its context is."""
    return any(flag.startswith("--context-length") for flag in flags)


def _kinds(names: Sequence[str], pair: Pair, gpu: bool) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """(kinds that run, kinds that cannot and why)"""
    kinds = [kind for name, kind in NAMES.items() if name in names]
    reason = checkpoints.why_no_built_in(pair, gpu)
    if BUILT_IN not in kinds or reason is None:
        return tuple(kinds), ()
    return tuple(kind for kind in kinds if kind != BUILT_IN), ((BUILT_IN, reason),)


def _together(options: argparse.Namespace, pair: Pair, gpu: bool, kinds: Sequence[str]) -> tuple[bool, str]:
    """(whether all servers are up at once, why). By default where a rough estimate fits into the first GPU."""
    if options.together or options.in_turn or not gpu:
        return not options.in_turn, "--in-turn" if options.in_turn else "--together" if gpu else "on a CPU"
    told = nvidia_smi("memory.free").splitlines()
    if not told or not all(line.isdecimal() for line in told):
        return False, "nvidia-smi does not tell how much memory is free"
    free = min(map(int, told)) * MIB
    # A quarter of the weights and 8 GiB for KV, graphs and workspaces.
    sizes = [pair.target_bytes + (0 if kind == PLAIN else pair.draft_bytes) for kind in kinds]
    needed = int(sum(1.25 * size + 8 * GIB for size in sizes))
    fits = bool(pair.target_bytes) and needed <= 0.9 * free
    return fits, f"about {needed / GIB:.0f} GiB for {len(kinds)} servers, {free / GIB:.0f} GiB free on a GPU"
