"""The options of `dflash-sglang check`, and what they mean for these checkpoints."""

from __future__ import annotations

import argparse
import http.client
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_sglang.bench import checkpoints
from dflash_sglang.bench.arguments import check_config, sets_context
from dflash_sglang.bench.checkpoints import Pair
from dflash_sglang.bench.plot import can_draw
from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.check import prompts
from dflash_sglang.check.verdict import Baseline, packaged_baseline, read_baseline
from dflash_sglang.checkpoint.left_out import NO_FLAGS, Flags
from dflash_sglang.demo.server import Client
from dflash_sglang.pair import held_out_prompts

SET_HERE = (
    "--model",
    "--model-path",
    "--host",
    "--port",
    "--speculative-algorithm",
    "--speculative-draft-model-path",
)
SPECULATIVE = "--speculative-"  # such a flag is for the server with DFLASH


@dataclass(frozen=True)
class Settings:
    pair: Pair
    url: str | None  # a running server with DFLASH, or None to launch one
    gpu: bool
    prompts: Sequence[list[int]] = field(repr=False)  # token ids of each
    chat: bool  # the texts have got the target's chat template
    max_new_tokens: int
    concurrency: int
    flags: tuple[str, ...]  # of both servers
    draft_flags: tuple[str, ...]  # of the server with DFLASH only
    baseline: Baseline | None
    png: Path | None
    decode: Callable[[Sequence[int]], str]  # the text of token ids


def add_parser(commands: Any) -> None:
    """`commands`: what `add_subparsers` gave."""
    parser = commands.add_parser(
        "check",
        help="check your target and draft on your prompts: outputs, accept length, a verdict",
        description="Serves the target with DFLASH and without, asks both for greedy completions of the prompts, "
        "and compares. Options that are not listed here are launch flags of SGLang, for both servers; those that "
        "begin with --speculative- are for the server with DFLASH.",
    )
    parser.add_argument("--target", help="checkpoint directory (default: the pair of this package)")
    parser.add_argument("--draft", help="checkpoint directory")
    parser.add_argument(
        "--prompts",
        type=Path,
        help="texts or lists of token ids: a .json list, .jsonl, or a file with a text a line",
    )
    parser.add_argument("--chat", action="store_true", help="apply the target's chat template to the texts")
    parser.add_argument("--url", help="a running server with DFLASH, in place of one that is launched")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each completion (default 128)")
    parser.add_argument("--concurrency", type=int, default=8, help="prompts at a time (default 8)")
    parser.add_argument("--baseline", type=Path, help="what --json printed for an earlier run, to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object; progress goes to stderr")
    parser.add_argument("--png", type=Path, help="draw acceptance by position, which needs matplotlib")


def settings_of(options: argparse.Namespace, flags: Sequence[str], gpu: bool) -> Settings:
    """The checked settings. Raises BadSetting."""
    for name, least in (("max_new_tokens", 2), ("concurrency", 1)):
        if (value := getattr(options, name)) < least:
            raise BadSetting(f"--{name.replace('_', '-')} {value}: expected at least {least}")
    if options.url is not None and not options.url.startswith(("http://", "https://")):
        raise BadSetting(f"--url {options.url}: expected the address of a server, such as http://127.0.0.1:30000")
    if options.png is not None:
        _check_writable(options.png)
    shared, draft_flags = divided(flags)
    if options.url is not None and draft_flags:
        raise BadSetting(f"{draft_flags[0]}: is for a server that is launched; leave it or --url out")
    if options.target and options.prompts is None:
        raise BadSetting("--prompts: expected a file with texts like those that the server gets")
    pair = _pair(options, Flags.of_words(draft_flags))
    baseline = read_baseline(options.baseline) if options.baseline else None
    packaged = not options.target and options.prompts is None
    chat = options.chat or packaged
    if chat:
        checkpoints.check_template(pair.target)
    if packaged and baseline is None:
        baseline = packaged_baseline()
    check_config()
    tokenizer = _tokenizer(pair.target, "--trust-remote-code" in shared)
    given = [one.text for one in held_out_prompts()] if packaged else prompts.read(options.prompts)
    ids = prompts.tokens(given, tokenizer, pair.vocabulary, options.prompts, chat)
    longest = max(map(len, ids))
    if pair.context and longest + options.max_new_tokens > pair.context and not sets_context(shared):
        raise BadSetting(
            f"--prompts {options.prompts}: {longest} tokens and {options.max_new_tokens} new ones: expected at "
            f"most {pair.context} together, the context of {pair.target}; shorten it or lower --max-new-tokens"
        )
    return Settings(
        pair=pair,
        url=options.url,
        gpu=gpu,
        prompts=ids,
        chat=chat,
        max_new_tokens=options.max_new_tokens,
        concurrency=options.concurrency,
        flags=shared,
        draft_flags=draft_flags,
        baseline=baseline,
        png=options.png,
        decode=tokenizer.decode,
    )


def _pair(options: argparse.Namespace, flags: Flags) -> Pair:
    """Reads what the draft's config.json leaves out from the flags, or from a running server."""
    try:
        return checkpoints.find(options.target, options.draft, None, None, Path(), lambda _: None, flags)
    except BadSetting:
        if options.url is None:
            raise
    served = _flags_of_server(options.url)
    return checkpoints.find(options.target, options.draft, None, None, Path(), lambda _: None, served)


def _flags_of_server(url: str) -> Flags:
    """Of a running server; none of one that does not answer as SGLang does."""
    try:
        info = Client(url).get("/server_info")
    except (OSError, http.client.HTTPException, ValueError):
        return NO_FLAGS
    if not isinstance(info, dict):
        return NO_FLAGS
    return Flags(info.get("speculative_num_draft_tokens"), info.get("speculative_draft_window_size"))


def divided(flags: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(launch flags of both servers, those of the server with DFLASH only), each with its values.

    Raises BadSetting for a flag that this command sets, and for a word that belongs to no flag.
    """
    shared: list[str] = []
    draft: list[str] = []
    into = None
    for word in flags:
        if word.startswith("--"):
            name = word.partition("=")[0]
            if name in SET_HERE:
                raise BadSetting(f"{name}: is set by check; name the checkpoints with --target and --draft")
            into = draft if name.startswith(SPECULATIVE) else shared
        if into is None:
            raise BadSetting(f"{word}: expected an option or a launch flag, which begins with --")
        into.append(word)
    return tuple(shared), tuple(draft)


def _check_writable(path: Path) -> None:
    directory = path.absolute().parent
    if path.is_dir() or not directory.is_dir() or not os.access(path if path.exists() else directory, os.W_OK):
        raise BadSetting(f"--png {path}: expected a file that can be written")
    if not can_draw():
        raise BadSetting(f"--png {path}: matplotlib is not installed (pip install 'dflash_sglang[bench]')")


def _tokenizer(target: str, trusted: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target, trust_remote_code=trusted)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise BadSetting(f"--target {target}: expected a checkpoint with a tokenizer ({reason})") from error
