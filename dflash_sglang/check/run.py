"""`dflash-sglang check` from start to end: both servers' outputs, where they part, and the verdict."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflash_sglang.bench.settings import BadSetting
from dflash_sglang.bench.steps import steps_of
from dflash_sglang.broken import POSITIONS, Window
from dflash_sglang.check.acceptance import acceptance
from dflash_sglang.check.arguments import Settings, settings_of
from dflash_sglang.check.parting import first_parting
from dflash_sglang.check.report import draw, findings, table
from dflash_sglang.check.servers import dflash_server, facts_of, plain_server
from dflash_sglang.check.verdict import GOOD, Judged
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Client, ServerFailed
from dflash_sglang.requests.limits import COPY, KEY

BAR = 24  # characters of a full progress bar
# Accepted copies would say nothing of the draft. Another worker, and a server without one, read nothing of it.
NO_COPIES = {KEY: {COPY: False}}


class Answer(NamedTuple):
    """One greedy completion."""

    ids: list[int]
    histogram: list[int]  # how many verify steps accepted 0, 1, 2, ... proposals; empty without speculation


def check(options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Return the exit code: 0 for a pair that is fine or weak, 1 for another verdict. `flags`: launch flags.

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
                first_parting(server, facts.dtype, number, settings.prompts[number], *both)
                for number, both in enumerate(outputs)
            ]
    histograms = [answer.histogram for answer in dflash]
    if not any(histograms):
        raise BadSetting("--prompts: every completion ended with its first token; expected some of two or more")
    accepted = acceptance(histograms, facts.block)
    window = steps.window if facts.ours else Window(one.value for one in accepted.positions[:POSITIONS])
    speed = None  # of a running server, whose other requests are unknown
    if settings.url is None:
        speed = statistics.median(plain / ours for ours, plain in zip(seconds, plain_seconds, strict=True))
    judged = Judged(tuple(filter(None, partings)), accepted, window, speed, settings.baseline)
    return findings(settings, facts, steps.by_width, outputs, judged)


def _answers(
    settings: Settings, server: Client, name: str, progress: Progress
) -> tuple[list[Answer], list[float]]:
    """(completions of all prompts, each to its EOS or limit, seconds of each `concurrency` of them, asked at a
    time)"""
    count, asked = len(settings.prompts), {"temperature": 0, "max_new_tokens": settings.max_new_tokens}
    out: list[Answer] = []
    seconds: list[float] = []
    progress.begin(f"{count} prompts, {name}")
    for start in range(0, count, settings.concurrency):
        began = time.perf_counter()
        found = server.generate(
            input_ids=settings.prompts[start : start + settings.concurrency],
            sampling_params={**asked, "custom_params": NO_COPIES},
        )
        seconds.append(time.perf_counter() - began)
        out += [Answer(of["output_ids"], of["meta_info"].get("spec_correct_drafts_histogram", [])) for of in found]
        done = round(BAR * len(out) / count)
        progress.update(f"[{'#' * done}{'-' * (BAR - done)}] {len(out)} of {count}")
    progress.end(f"{sum(len(one.ids) for one in out)} tokens")
    return out, seconds
