"""A server of several processes, one per node, asked through the first; and what its log says of memory."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.layouts import Layout
from dflash_sglang.demo.launch import READY_TIMEOUT, assert_worker, new_server
from dflash_sglang.demo.server import Server, ServerFailed

# Not at the start of a line: a progress bar may stand before.
RANK = r"\[[\d-]+ [\d:.]+(?P<rank>(?: [A-Z_]+\d+)*)\] "
WEIGHTS = re.compile(RANK + r"Load weight end\..* type=(?P<model>\w+),.* mem usage=(?P<gb>-?[\d.]+) GB")
KV = re.compile(RANK + r"KV Cache is allocated\..* #tokens: (?P<tokens>\d+), K size: (?P<k>[\d.]+) GB, "
                r"V size: (?P<v>[\d.]+) GB")  # fmt: skip
READY = "The server is fired up and ready to roll!"
DRAFT_MODEL = "DFlashDraftModel"


class Cluster:
    """The processes of one server; `with` starts them all and ends them all."""

    def __init__(
        self,
        layout: Layout,
        kind: str,
        flags: Sequence[str],
        port: int,
        environment: Mapping[str, str],
        logs: Path,
    ) -> None:
        self.layout, self.kind = layout, kind
        self.nodes = [
            new_server(
                [*flags, *layout.flags_of(node, port)],
                environment=environment,
                log=logs / f"{layout.name}-{kind}-{node}.log",
                port=port + node,
            )
            for node in range(layout.nodes)
        ]
        self._running: list[Server] = []
        self.started = False

    @property
    def head(self) -> Server:
        """The process that takes requests."""
        return self.nodes[0]

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all processes; `stop` ends them, also where one did not start."""
        self.started = True
        for node in self.nodes:
            self._running.append(node.__enter__())

    def stop(self) -> None:
        """Ends what runs of it; once is enough."""
        running, self._running = self._running, []
        if running:
            with ThreadPoolExecutor(len(running)) as pool:
                list(pool.map(lambda node: node.stop(), running))

    def wait_ready(self) -> None:
        """Returns once it answers. Raises ServerFailed where a process ends first, RuntimeError where the log
        shows another kind's worker."""
        self.head.wait_ready(READY_TIMEOUT, self._check_nodes)
        assert_worker(self.kind, self.head.log_text())

    def wait_loaded(self) -> None:
        """Returns once every rank has loaded the draft. Raises ServerFailed where a process ends first, or none
        comes."""
        deadline = time.monotonic() + READY_TIMEOUT
        while not self._is_loaded(self.log_text()):
            if self.head.process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"not every rank has loaded the draft\n{self.head.log_tail()}")
            self._check_nodes()
            time.sleep(0.5)

    def _is_loaded(self, log: str) -> bool:
        drafts = sum(found["model"] == DRAFT_MODEL for found in WEIGHTS.finditer(log))
        return drafts >= self.layout.gpus or READY in log

    def _check_nodes(self) -> None:
        for node in self.nodes[1:]:
            if node.process.poll() is not None:
                raise ServerFailed(f"a node ended with exit code {node.process.returncode}\n{node.log_tail()}")

    def log_text(self) -> str:
        return "\n".join(node.log_text() for node in self._logging)

    def log_tail(self, lines: int = 60) -> list[str]:
        """The last lines of every process's log, without directories."""
        return [line for node in self._logging for line in (node.log.name, *node.log_text().splitlines()[-lines:])]

    @property
    def _logging(self) -> list[Server]:
        return [node for node in self.nodes if node.log.exists()]


def stop_together(clusters: Collection[Cluster]) -> None:
    """Ends all of them at once: each takes some seconds."""
    with ThreadPoolExecutor(len(clusters)) as pool:
        list(pool.map(Cluster.stop, clusters))


def stop_on_sigterm(clusters: Collection[Cluster]) -> None:
    """From now on SIGTERM ends this process after the servers, whose last lines it shows."""

    def end(*_: Any) -> None:
        stop_together(clusters)
        for cluster in clusters:
            print(*cluster.log_tail(), sep="\n", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def memory_of(log: str) -> dict[str, Any]:
    """By rank, as the log names it: GB of each model's weights, and of the KV pools in the order of their
    allocation (the target's, then the draft's) with their tokens.

    SGLang measures weights as what the GPU has less of: they are right where nothing else started meanwhile.
    """
    out: dict[str, Any] = {}
    for found in WEIGHTS.finditer(log):
        rank = out.setdefault(found["rank"].strip() or "TP0", {"weights_gb": {}, "kv": []})
        rank["weights_gb"][found["model"]] = float(found["gb"])
    for found in KV.finditer(log):
        rank = out.setdefault(found["rank"].strip() or "TP0", {"weights_gb": {}, "kv": []})
        rank["kv"].append({"tokens": int(found["tokens"]), "gb": round(float(found["k"]) + float(found["v"]), 2)})
    return out
