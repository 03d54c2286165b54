"""`dflash-sglang check` from start to end: both servers' outputs, where they part, and the verdict."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.bench.versions import versions
from dflash_sglang.broken import POSITIONS, Window
from dflash_sglang.check import ask
from dflash_sglang.check.acceptance import acceptance
from dflash_sglang.check.arguments import Settings, settings_of
from dflash_sglang.check.ask import Answer
from dflash_sglang.check.findings import findings
from dflash_sglang.check.parting import Parting, first_difference, is_near_tie, margin
from dflash_sglang.check.plot import draw
from dflash_sglang.check.servers import dflash_server, facts_of, plain_server, steps_of
from dflash_sglang.check.table import table
from dflash_sglang.check.verdict import GOOD, Judged
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Client, ServerFailed

BAR = 24  # characters of a full progress bar


def check(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """The exit code: 0 for a pair that is fine or weak, 1 for another verdict. `flags`: launch flags.

    Raises BadSetting for options and files, and ServerFailed.
    """
    import torch

    settings = settings_of(options, flags, torch.cuda.is_available())
    found = measure(settings, Progress(sys.stderr if options.json else sys.stdout))
    print(json.dumps(found, indent=1) if options.json else f"\n{table(found)}", flush=True)
    if settings.png is not None:
        draw(found, settings.png)
    return 0 if found["verdict"] in GOOD else 1


def measure(settings: Settings, progress: Progress) -> dict[str, Any]:
    """The findings. The servers run one after the other, and end. Raises ServerFailed and BadSetting."""
    with tempfile.TemporaryDirectory(prefix="dflash-sglang-check-") as directory:
        with dflash_server(settings, Path(directory), progress) as server:
            facts, before = facts_of(settings, server), steps_of(server)
            dflash, seconds = _answers(settings, server, "DFLASH", progress)
            steps = steps_of(server).since(before)
            if facts.ours and not steps.window:
                raise ServerFailed(
                    "every step had width 1, so no proposal was verified: ask at a lower load, or serve with "
                    '{"width": "block"} in DFLASH_SGLANG_CONFIG'
                )
        with plain_server(settings, facts, Path(directory), progress) as server:
            plain, plain_seconds = _answers(settings, server, "plain", progress)
            outputs = [(ours.ids, theirs.ids) for ours, theirs in zip(dflash, plain, strict=True)]
            partings = [
                _parting(settings, server, facts.dtype, prompt, at, *outputs[prompt])
                for prompt in range(len(outputs))
                if (at := first_difference(*outputs[prompt])) is not None
            ]
    histograms = [answer.histogram for answer in dflash]
    if not any(histograms):
        raise BadSetting("--prompts: every completion ended with its first token; expected some of two or more")
    command = ["dflash-sglang", *sys.argv[1:]]
    accepted = acceptance(histograms, facts.block)
    window = steps.window if facts.ours else Window(one.value for one in accepted.positions[:POSITIONS])
    speed = None  # of a running server, whose other requests are unknown
    if settings.url is None:
        speed = statistics.median(plain / ours for ours, plain in zip(seconds, plain_seconds, strict=True))
    judged = Judged(tuple(partings), accepted, window, speed, settings.baseline)
    return findings(settings, facts, steps.by_width, outputs, judged, command, versions())


def _answers(
    settings: Settings, server: Client, name: str, progress: Progress
) -> tuple[list[Answer], list[float]]:
    count = len(settings.prompts)
    progress.begin(f"{count} prompts, {name}")
    found, seconds = ask.answers(
        server,
        settings.prompts,
        settings.max_new_tokens,
        settings.concurrency,
        lambda done: progress.update(f"{bar(done / count)} {done} of {count}"),
    )
    progress.end(f"{sum(len(one.ids) for one in found)} tokens")
    return found, seconds


def bar(share: float) -> str:
    """A progress bar, such as [######------]."""
    done = round(BAR * share)
    return f"[{'#' * done}{'-' * (BAR - done)}]"


def _parting(
    settings: Settings, plain_server: Client, dtype: str, prompt: int, at: int, dflash: list[int], plain: list[int]
) -> Parting:
    """Judges the first difference of a prompt's outputs, by what the plain server has after the tokens before."""
    if at == len(plain):
        return Parting(prompt, at, None, dflash[at], None, None, None, near_tie=False)
    if at == len(dflash):
        return Parting(prompt, at, plain[at], None, None, None, None, near_tie=False)
    tokens = (plain[at], dflash[at])
    (one, other), likeliest = ask.likelihoods(plain_server, settings.prompts[prompt] + plain[:at], tokens)
    distance = margin([one, other], likeliest)
    return Parting(prompt, at, *tokens, one.rank, other.rank, distance, is_near_tie(distance, dtype))
