"""What tests of `dflash-sglang bench` share: settings of a command line, made-up outcomes and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_sglang.bench import arguments
from dflash_sglang.bench.load import Outcome
from dflash_sglang.bench.settings import Settings
from dflash_sglang.cli import _parser
from training.pair import pair_directories

PAIR = [word for role, path in pair_directories().items() for word in (f"--{role}", path)]


def settings_of(*options: str, gpu: bool = False, out: Path = Path("out")) -> Settings:
    pair = [] if "--target" in options else PAIR
    parsed = _parser().parse_args(["bench", "--out", str(out), *options, *pair])
    return arguments.settings_of(parsed, gpu, say=lambda text: None)


def outcome(rate: float, accept_length: float = 1.0) -> Outcome:
    return Outcome(rate, rate / 2, 40.0, 60.0, 5.0, 8.0, accept_length, 0.25, 4, 64, 1.0)


def rows_of(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def kernel(
    start: float, length: float, correlation: int, name: str = "gemm", cat: str = "kernel"
) -> dict[str, Any]:
    return dict(ph="X", cat=cat, name=name, ts=start, dur=length, args=dict(correlation=correlation))


def steps(count: int) -> list[dict[str, Any]]:
    """Of 200 us each: a verify graph of 10 kernels, a draft graph of 4, a graph of one, and three launches outside
    of graphs, two of them at once and one beside the draft."""
    events = []
    for step in range(count):
        at, launch = 200.0 * step, 10 * step
        verify = [kernel(at + 10 * i, 9, launch) for i in range(10)]
        draft = [kernel(at + 120 + 5 * i, 5, launch + 1) for i in range(4)]
        events += [*verify, *draft, kernel(at + 160, 2, launch + 2, "one")]
        events += [dict(ph="X", cat="cuda_runtime", name="cudaGraphLaunch", ts=at - 50, dur=1,
                        args=dict(correlation=launch + i)) for i in range(3)]  # fmt: skip
        events += [
            kernel(at + 105, 5, launch + 3, "copy", "gpu_memcpy"),
            kernel(at + 108, 6, launch + 4, "accept"),
        ]
        events += [kernel(at + 130, 20, launch + 5, "fill")]
        events += [dict(ph="X", cat="cpu_op", name="aten::copy_", ts=at, dur=3), dict(ph="i", name="mark", ts=at)]
    return events
