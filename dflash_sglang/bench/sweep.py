"""The measurement: servers up together and taking turns, or one after the other, through all cells and rounds."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_sglang.bench import load, prompts, servers
from dflash_sglang.bench.load import LoadFailed, Outcome
from dflash_sglang.bench.profile import take_apart
from dflash_sglang.bench.settings import Cell, Served, Settings
from dflash_sglang.bench.steps import Steps, no_steps, steps_of
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN, wait_for, worker_line
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Server, ServerFailed, first_error

COMPARED_PROMPTS = 4
COMPARED_TOKENS = 64


@dataclass
class Measured:
    """Everything that was measured on one server.

    ``counted``: steps of this package's worker, those of the warm-ups too; ``outputs``: greedy completions.
    """

    served: Served
    worker: str = ""
    rounds: dict[Cell, list[Outcome]] = field(default_factory=dict)
    counted: dict[Cell, Steps] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def widths(self, cell: Cell) -> dict[int, int] | None:
        """Steps by width where our worker chooses, else None."""
        chooses = cell in self.counted and self.served.width is None
        return dict(self.counted[cell].by_width) if chooses else None


def measure(settings: Settings, results: Mapping[Served, Measured], progress: Progress) -> None:
    """Fills `results`, one for each of `settings.served`; what they hold when something fails is measured.

    Raises ServerFailed or TraceError; all servers end in any case.
    """
    progress.begin("importing SGLang's load generator")
    load.generator()
    progress.end()
    with tempfile.TemporaryDirectory(prefix="dflash-sglang-bench-") as scratch:
        for group in [settings.served] if settings.together else [[served] for served in settings.served]:
            with contextlib.ExitStack() as stack:
                running = start(settings, group, stack, results, progress)
                for cell in settings.cells:
                    _rounds(settings, cell, running, results, Path(scratch), progress)
                if settings.accept_length is None:
                    for served, server in running.items():
                        with server.reported(str(served)):
                            results[served].outputs = _outputs(settings, served, server, progress)
                for concurrency in settings.profile:
                    asked = prompts.requests(settings, settings.inputs[0], concurrency)
                    for served, server in running.items():
                        if served.kind != PLAIN:
                            directory = settings.out / "traces" / f"{served.slug}_{concurrency}"
                            with server.reported(str(served)):
                                step = take_apart(server, str(served), asked, directory, progress)
                            results[served].steps.append(step)


def start(
    settings: Settings,
    group: Sequence[Served],
    stack: contextlib.ExitStack,
    results: Mapping[Served, Measured],
    progress: Progress,
) -> dict[Served, Server]:
    """Ready servers, which `stack` ends. Raises ServerFailed when one does not start or has another worker."""
    running: dict[Served, Server] = {}
    # The first start fills the compilation caches that the others, started at once, then share.
    for batch in (group[:1], group[1:]):
        for served in batch:
            running[served] = stack.enter_context(servers.server_of(settings, served))
        for served in batch:
            progress.begin(f"starting the server: {served}")
            try:
                wait_for(served.kind, running[served], progress.update)
            except ServerFailed as error:
                raise ServerFailed(_failure(settings, served, running[served], error)) from error
            results[served].worker = worker_line(running[served].log_text())
            progress.end("ready")
    return running


def _rounds(
    settings: Settings,
    cell: Cell,
    running: Mapping[Served, Server],
    results: Mapping[Served, Measured],
    scratch: Path,
    progress: Progress,
) -> None:
    count = settings.requests_of(cell)
    flags, ids = prompts.load_of(settings, cell, count, scratch / "prompts.json")
    flags += ["--num-prompts", str(count), "--max-concurrency", str(cell.concurrency)]
    flags += ["--warmup-requests", str(cell.concurrency), "--temperature", str(cell.temperature)]
    if cell.temperature > 0:
        flags += ["--top-p", str(settings.top_p)]
    for number in range(1, settings.rounds + 1):
        for served, server in load.rotated(list(running.items()), number - 1):
            progress.begin(f"{cell}, round {number} of {settings.rounds}: {served}")
            with server.reported(str(served), LoadFailed):
                before = steps_of(server) if served.kind == OURS else no_steps()
                outcome = load.run(
                    server, flags, served.kind != PLAIN, ids,
                    lambda done: progress.update(f"{done} requests, with the warm-up"),
                )  # fmt: skip
                if served.kind == OURS:
                    counted = results[served].counted
                    counted[cell] = counted.get(cell, no_steps()).plus(steps_of(server).since(before))
            results[served].rounds.setdefault(cell, []).append(outcome)
            accepted = "" if served.kind == PLAIN else f", accept length {outcome.accept_length:.2f}"
            progress.end(f"{outcome.output_tokens_per_second:.1f} tokens/s{accepted}")


def _outputs(settings: Settings, served: Served, server: Server, progress: Progress) -> list[list[int]]:
    asked = prompts.requests(settings, None, COMPARED_PROMPTS)
    progress.begin(f"greedy outputs of {len(asked)} prompts: {served}")
    new = min(COMPARED_TOKENS, settings.output)  # fits into the context
    params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
    outputs = [server.generate(**one, sampling_params=params)["output_ids"] for one in asked]
    progress.end(f"{sum(map(len, outputs))} tokens")
    return outputs


def _failure(settings: Settings, served: Served, server: Server, error: ServerFailed) -> str:
    """What went wrong first, by the log's own words, before the end of the log; and what can be left out."""
    lines = [f"{served}: {error}"]
    if reason := first_error(server.log_text()):
        lines.insert(0, f"{served}: {reason} ({server.log})")
    if served.kind == BUILT_IN:
        lines.append("the comparison runs without the built-in worker with: --servers plain ours")
    if settings.together:
        lines.append("where memory is short, --in-turn runs one server at a time")
    return "\n".join(lines)
