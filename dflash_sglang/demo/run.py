"""The demo from start to end: a DFLASH server, the same server without speculation, and the comparison."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dflash_sglang.demo.launch import Setup, proven_worker
from dflash_sglang.demo.measure import Run, run_prompts, stream_text
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.report import Comparison
from dflash_sglang.demo.signals import signals_as_exit

READY_TIMEOUT = 600.0  # seconds
STREAMED = 2  # completions shown as they arrive
SHOWN_PROMPT = 160  # characters of a prompt's end


def compare(setup: Setup, prompts: Sequence[str], max_new_tokens: int, progress: Progress) -> Comparison:
    """Runs the prompts on one server after the other. Raises ServerFailed; both servers end in any case."""
    with tempfile.TemporaryDirectory(prefix="dflash-sglang-demo-") as directory, signals_as_exit():
        dflash, worker = _measure(setup, True, prompts, max_new_tokens, progress, Path(directory))
        plain, _ = _measure(setup, False, prompts, max_new_tokens, progress, Path(directory))
    return Comparison(
        worker=worker,
        device="cuda" if setup.gpu else "cpu",
        dtype=setup.dtype,
        max_new_tokens=max_new_tokens,
        dflash=dflash,
        plain=plain,
    )


def _measure(
    setup: Setup,
    speculative: bool,
    prompts: Sequence[str],
    max_new_tokens: int,
    progress: Progress,
    directory: Path,
) -> tuple[Run, str]:
    """Returns the run and, with speculation, the worker's name."""
    name = "DFLASH" if speculative else "plain"
    worker = ""
    server = setup.server(speculative=speculative, inherited=os.environ, directory=directory)
    with server:
        progress.begin(f"starting the {name} server")
        server.wait_ready(READY_TIMEOUT, progress.update)
        if speculative:
            worker = proven_worker(server)
        progress.end(worker or "ready")
        with server.reported(f"the {name} server"):
            if speculative:
                for prompt in prompts[:STREAMED]:
                    progress.text(f"\n--- prompt: ...{prompt[-SHOWN_PROMPT:]}\n--- completion: ")
                    stream_text(server, prompt, max_new_tokens, progress.text)
                    progress.text("\n\n")
            progress.begin(f"{len(prompts)} prompts, {name}")
            run = run_prompts(
                server, prompts, max_new_tokens, lambda done: progress.update(f"{done} of {len(prompts)}")
            )
            progress.end(f"{run.tokens_per_second:.1f} tokens/s")
    return run, worker
