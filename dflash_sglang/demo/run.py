"""The demo from start to end: a DFLASH server, the same server without speculation, and the comparison."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dflash_sglang import __version__
from dflash_sglang.demo.launch import OURS, PLAIN, environment, model_flags, new_server, wait_for
from dflash_sglang.demo.measure import Run, stream_answer
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.report import Compared, Comparison
from dflash_sglang.demo.server import Server
from dflash_sglang.pair import Prompt

WORKER = f"dflash_sglang {__version__}"  # proven by the log of the server
NAMES = {PLAIN: "plain", OURS: "DFLASH"}
READY_TIMEOUT = 600.0  # seconds


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
        shared += ["--sleep-on-idle", "--mem-fraction-static", "0.4"]
        if not self.gpu:
            shared += ["--device", "cpu"]
        return [*shared, *model_flags(kind, self.target, self.draft)]

    def server(self, kind: str, directory: Path) -> Server:
        """A server on a free port, logging into `directory`; not started yet."""
        return new_server(
            self.flags(kind),
            environment=environment(kind, cpu=not self.gpu, chooses=True),
            log=directory / f"{NAMES[kind]}.log",
        )


def compare(
    setup: Setup, prompts: Sequence[Prompt], texts: Sequence[str], max_new_tokens: int, progress: Progress
) -> Comparison:
    """Asks both servers each prompt, the one after the other, and shows both answers as they come.

    texts: the prompts with the chat template. Raises ServerFailed; both servers end in any case.
    """
    with tempfile.TemporaryDirectory(prefix="dflash-sglang-demo-") as directory, ExitStack() as stack:
        servers = {kind: stack.enter_context(setup.server(kind, Path(directory))) for kind in NAMES}
        for kind, server in servers.items():
            progress.begin(f"starting the {NAMES[kind]} server")
            wait_for(kind, server, progress.update, READY_TIMEOUT)
            progress.end(WORKER if kind == OURS else "ready")
        for kind, server in servers.items():  # not counted: first requests compile, and fill caches
            with server.reported(f"the {NAMES[kind]} server"):
                stream_answer(server, texts[0], 8, lambda text: None)
        compared = []
        for prompt, text in zip(prompts, texts, strict=True):
            progress.text(f"\n=== {prompt.topic}: {prompt.text}\n")
            runs = {
                kind: _answer(kind, server, text, max_new_tokens, progress) for kind, server in servers.items()
            }
            compared.append(Compared(prompt.topic, runs[PLAIN], runs[OURS]))
    return Comparison(WORKER, "cuda" if setup.gpu else "cpu", setup.dtype, max_new_tokens, compared)


def _answer(kind: str, server: Server, text: str, max_new_tokens: int, progress: Progress) -> Run:
    progress.text(f"--- {NAMES[kind]}\n")
    with server.reported(f"the {NAMES[kind]} server"):
        run = stream_answer(server, text, max_new_tokens, progress.text)
    accepted = f", accept length {run.accept_length:.2f}" if kind == OURS else ""
    progress.text(f"\n[{run.tokens} tokens, {run.tokens_per_second:.1f} tokens/s{accepted}]\n")
    return run
