"""The demo from start to end: a DFLASH server, the same server without speculation, and the comparison."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_sglang import __version__
from dflash_sglang.demo.launch import OURS, PLAIN, environment, model_flags, new_server, wait_for
from dflash_sglang.demo.measure import Run, run_prompts, stream_text
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.report import HEADING, MARK, Comparison, ending
from dflash_sglang.demo.server import Server

WORKER = f"dflash_sglang {__version__}"  # proven by the log of the server
NAMES = {OURS: "DFLASH", PLAIN: "plain"}
READY_TIMEOUT = 600.0  # seconds
STREAMED = slice(2, None, 3)  # of the prompts, whose completions are shown as they arrive: two of eight


@dataclass(frozen=True)
class Setup:
    """What both servers share."""

    target: str  # checkpoint directory
    draft: str  # checkpoint directory
    gpu: bool

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.gpu else "float32"

    def flags(self, kind: str) -> list[str]:
        """Arguments of `python -m sglang.launch_server`, without its port."""
        shared = ["--dtype", self.dtype, "--max-total-tokens", "20000", "--max-running-requests", "8"]
        if not self.gpu:
            shared += ["--device", "cpu", "--mem-fraction-static", "0.1"]
        return [*shared, *model_flags(kind, self.target, self.draft)]

    def server(self, kind: str, directory: Path) -> Server:
        """A server on a free port, logging into `directory`; not started yet."""
        return new_server(
            self.flags(kind),
            environment=environment(kind, cpu=not self.gpu, chooses=True),
            log=directory / f"{NAMES[kind]}.log",
        )


def compare(setup: Setup, prompts: Sequence[str], max_new_tokens: int, progress: Progress) -> Comparison:
    """Runs the prompts on one server after the other. Raises ServerFailed; both servers end in any case."""
    with tempfile.TemporaryDirectory(prefix="dflash-sglang-demo-") as directory:
        runs = {kind: _measure(setup, kind, prompts, max_new_tokens, progress, Path(directory)) for kind in NAMES}
    return Comparison(
        worker=WORKER,
        device="cuda" if setup.gpu else "cpu",
        dtype=setup.dtype,
        max_new_tokens=max_new_tokens,
        dflash=runs[OURS],
        plain=runs[PLAIN],
    )


def _measure(
    setup: Setup,
    kind: str,
    prompts: Sequence[str],
    max_new_tokens: int,
    progress: Progress,
    directory: Path,
) -> Run:
    name = NAMES[kind]
    with setup.server(kind, directory) as server:
        progress.begin(f"starting the {name} server")
        wait_for(kind, server, progress.update, READY_TIMEOUT)
        progress.end(WORKER if kind == OURS else "ready")
        with server.reported(f"the {name} server"):
            if kind == OURS:
                for prompt in prompts[STREAMED] or prompts[:1]:
                    progress.text(f"\n{HEADING}\n{ending(prompt)}{MARK}")
                    stream_text(server, prompt, max_new_tokens, progress.text)
                    progress.text("\n")
            progress.begin(f"{len(prompts)} prompts, {name}")
            run = run_prompts(
                server, prompts, max_new_tokens, lambda done: progress.update(f"{done} of {len(prompts)}")
            )
            progress.end(f"{run.tokens_per_second:.1f} tokens/s")
    return run
