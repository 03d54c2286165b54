"""What the scheduler's thread does in a decode step, stage by stage, in microseconds.

python -m bench.host_step --target DIR --draft DIR --out FILE [--batch 1 32 64 128] [--width 4]

Runs on a GPU with checkpoints of any size, and without one on the CPU platform with a pair so small that the
host's work shows (`bench.random_pair --shape tiny`). Stages are of this package's worker or the built-in one
("worker"), of SGLang ("sglang"), launches of the two forwards and of context KV ("forward": on a CPU they run
there) and, on a GPU, the host's waiting for it ("wait": a host that waits does not hold the GPU up). Acceptance is
forced.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.host_stages import FORWARD, PLUGIN, SGLANG, WAIT, WORKER, installed
from dflash_sglang.bench import kinds
from dflash_sglang.bench.kinds import BUILT_IN, OURS, wait_for
from dflash_sglang.demo.server import Server, free_port

KINDS = (OURS, BUILT_IN)
ON_CPU = ["--device", "cpu", "--dtype", "float32"]
Figures = dict[str, Any]  # of one batch size, as `host_stages` writes them


def server_of(kind: str, arguments: argparse.Namespace, scratch: Path) -> Server:
    """The server of one kind with the clock in its scheduler, not started yet."""
    port, gpu = free_port(), torch.cuda.is_available()
    most = max(arguments.batch)
    flags = [
        "--model-path", arguments.target, "--speculative-draft-model-path", arguments.draft,
        "--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", str(arguments.width),
        "--skip-tokenizer-init", "--port", str(port), "--max-running-requests", str(most),
        "--min-free-slots-delay", "1", "--max-total-tokens", str(most * (arguments.output + 512)),
        *(["--cuda-graph-max-bs-decode", str(most)] if gpu else ON_CPU), *arguments.flags,
    ]  # fmt: skip
    environment = {
        **os.environ,
        **({} if gpu else {"SGLANG_PLATFORM": "dflash_cpu", "OMP_NUM_THREADS": "1"}),
        **installed(scratch),
        **(kinds.environment(OURS) if kind == OURS else {"SGLANG_PLUGINS": PLUGIN}),
        "SGLANG_SIMULATE_ACC_LEN": str(arguments.accept_length),
    }
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    return Server(command, port=port, environment=environment, log=scratch / "server.log")


def measure(server: Server, stages: Path, arguments: argparse.Namespace) -> dict[str, Figures]:
    """{batch size: figures} of a ready server."""
    sampling = {"temperature": 0.0, "max_new_tokens": arguments.output, "ignore_eos": True}
    for requests in arguments.batch:
        for _ in range(1 + arguments.rounds):  # the first is the warm-up, and counts for little in a median
            stages.unlink(missing_ok=True)
            server.generate(input_ids=[[5 + i % 200] * 4 for i in range(requests)], sampling_params=sampling)
            while not stages.exists():  # the scheduler has noticed that it is idle
                time.sleep(0.05)
    written = json.loads(stages.read_text())
    return {str(requests): written[str(requests)] for requests in arguments.batch}


def of_owner(figures: Figures, owner: str) -> float:
    """Microseconds of a step that an owner's stages take together."""
    return sum(time for stage, time in figures["stages"].items() if stage.startswith(f"{owner}:"))


def table(by_batch: dict[str, Figures]) -> str:
    """The stages in the order of their time at the largest batch, the owners' sums below."""
    columns = list(by_batch.values())
    stages = sorted({stage for figures in columns for stage in figures["stages"]})
    stages.sort(key=lambda stage: -columns[-1]["stages"].get(stage, 0))
    rows = [(stage, [figures["stages"].get(stage, 0) for figures in columns]) for stage in stages]
    rows = [row for row in rows if max(row[1]) >= 1]
    rows += [
        (owner, [of_owner(figures, owner) for figures in columns]) for owner in (WORKER, SGLANG, FORWARD, WAIT)
    ]
    rows.append(("step", [figures["whole"] for figures in columns]))
    lines = [f"{'microseconds':60}" + "".join(f"{size:>10}" for size in by_batch)]
    return "\n".join(lines + [f"{name:60}" + "".join(f"{time:10.1f}" for time in times) for name, times in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 64, 128])
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--output", type=int, default=256, help="new tokens of a request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--accept-length", type=float, default=3.2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of the servers, one string")
    arguments = parser.parse_args()
    figures = {}
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            with server_of(kind, arguments, Path(scratch)) as server:
                wait_for(kind, server)
                figures[kind] = measure(server, Path(scratch) / "stages.json", arguments)
        print(f"{kind}, width {arguments.width}\n{table(figures[kind])}\n", flush=True)
    claims = [
        report.at_most(
            f"host time of the worker over the built-in one's, {requests} requests of width {arguments.width}",
            round(of_owner(figures[OURS][requests], WORKER) / of_owner(figures[BUILT_IN][requests], WORKER), 3),
            1.0,
        )
        for requests in map(str, arguments.batch)
        if set(KINDS) <= set(figures)
    ]
    return report.finish("bench.host_step", arguments.out, claims, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
