"""Norm and RoPE of a block's query and key heads on a GPU: this package's kernel against SGLang's.

python -m bench.draft_rope --out FILE [--rows 16 128 512 2048] [--launches 50]

Heads of Qwen3-8B, bfloat16, in place on rows that hold the values too. Per number of rows the time of one launch
in a CUDA graph of many, the median of replays in turn. A graph goes through as many tensors as a draft has layers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.graph_times import captured, replayed_in_turn
from dflash_sglang.kernels.context.qk_norm_rope import qk_norm_rope_

HEADS, KV_HEADS, DIM = 32, 8, 128
POSITIONS, EPS = 40960, 1e-6
LAYERS = 5
REPLAYS = 30
OURS, SGLANG = "ours", "sglang"
# Fewer rows are one wave of programs, whose time is a launch's.
BOUNDS = {16: 1.1, 128: 1.0, 512: 0.5, 2048: 0.5}
Launch = Callable[[torch.Tensor], None]


class Inputs:
    """What all tensors of some rows share, and the tensors."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, device="cuda", generator=generator)

        self.positions = torch.randint(POSITIONS, (rows,), device="cuda", generator=generator)
        self.q_norm, self.k_norm = (1 + normal(2, DIM) / 8).bfloat16()
        angles = torch.outer(torch.arange(POSITIONS), 1e6 ** (-torch.arange(0, DIM, 2) / DIM)).cuda()
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        self.tensors = [normal(rows, (HEADS + 2 * KV_HEADS) * DIM).bfloat16() for _ in range(LAYERS)]

    def ours(self, qk: torch.Tensor) -> None:
        norms = (self.q_norm, self.k_norm)
        qk_norm_rope_(qk, self.positions, *norms, self.cos_sin, HEADS, KV_HEADS, DIM, EPS)

    def sglang(self, qk: torch.Tensor) -> None:
        from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_

        norms = (self.q_norm, self.k_norm)
        table_qk_norm_rope_(qk, self.positions, *norms, self.cos_sin, HEADS, KV_HEADS, DIM, EPS)


def differing(inputs: Inputs) -> int:
    """Elements of a row tensor that the two leave with different bits."""
    left = []
    for launch in (inputs.ours, inputs.sglang):
        qk = inputs.tensors[0].clone()
        launch(qk)
        left.append(qk.view(torch.int16))
    return int((left[0] != left[1]).sum())


def measure(rows: int, launches: int) -> dict[str, Any]:
    """Microseconds of a launch of each, and the elements that differ."""
    inputs = Inputs(rows)
    figures: dict[str, Any] = {"differing_elements": differing(inputs)}

    def graph_of(launch: Launch) -> torch.cuda.CUDAGraph:
        def run() -> None:
            for i in range(launches):
                launch(inputs.tensors[i % LAYERS])

        return captured(run)[0]

    graphs = {OURS: graph_of(inputs.ours), SGLANG: graph_of(inputs.sglang)}
    for kind, times in replayed_in_turn(graphs, REPLAYS).items():
        figures[f"{kind}_us"] = round(1000 * statistics.median(times) / launches, 3)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=list(BOUNDS))
    parser.add_argument("--launches", type=int, default=50, help="of each graph")
    arguments = parser.parse_args()
    figures, claims = {}, []
    for rows in arguments.rows:
        found = figures[rows] = measure(rows, arguments.launches)
        print(rows, found, flush=True)
        ratio = round(found[f"{OURS}_us"] / found[f"{SGLANG}_us"], 4)
        claims.append(report.at_most(f"{rows} rows: time over SGLang's", ratio, BOUNDS.get(rows, 1.0)))
        claims.append(report.at_most(f"{rows} rows: elements with other bits", found["differing_elements"], 0))
    return report.finish("bench.draft_rope", arguments.out, claims, figures=figures, launches=arguments.launches)


if __name__ == "__main__":
    sys.exit(main())
