"""How the demo starts its servers: the same settings with and without speculation, on GPU or CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflash_sglang.demo.server import Server, ServerFailed, free_port

_WORKER_LINE = re.compile(r"dflash_sglang (\S+) worker active")


@dataclass(frozen=True)
class Setup:
    """What both servers share."""

    target: str  # checkpoint directory
    draft: str  # checkpoint directory
    gpu: bool

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.gpu else "float32"

    def arguments(self, *, speculative: bool, port: int) -> list[str]:
        """Arguments of `python -m sglang.launch_server`."""
        arguments = ["--model-path", self.target, "--dtype", self.dtype, "--port", str(port)]
        arguments += ["--max-total-tokens", "20000", "--max-running-requests", "8"]
        if not self.gpu:
            arguments += ["--device", "cpu", "--mem-fraction-static", "0.1"]
        if speculative:
            arguments += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", self.draft]
        return arguments

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The servers' environment: ours or nothing decodes DFLASH; one thread per process on the CPU."""
        environment = {**inherited, "DFLASH_SGLANG_REQUIRE": "1", "PYTHONUNBUFFERED": "1"}
        if not self.gpu:
            environment |= {"SGLANG_PLATFORM": "dflash_cpu", "OMP_NUM_THREADS": "1"}
        return environment

    def server(self, *, speculative: bool, inherited: Mapping[str, str], directory: Path) -> Server:
        """A server on a free port, logging into `directory`; not started yet."""
        port = free_port()
        return Server(
            [
                sys.executable,
                "-m",
                "sglang.launch_server",
                *self.arguments(speculative=speculative, port=port),
            ],
            port=port,
            environment=self.environment(inherited),
            log=directory / ("dflash.log" if speculative else "plain.log"),
        )


def proven_worker(server: Server) -> str:
    """Returns `dflash_sglang <version>` from the line the worker itself logged; ServerFailed without one."""
    line = _WORKER_LINE.search(server.log_text())
    if line is None:
        raise ServerFailed(
            "the server's log has no line `dflash_sglang <version> worker active`: another worker runs. "
            f"Check that SGLANG_PLUGINS does not leave dflash_sglang out.\n{server.log_tail()}"
        )
    return f"dflash_sglang {line.group(1)}"
