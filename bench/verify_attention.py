"""Attention of blocks on a GPU: what FlashAttention 3 takes as SGLang calls it, and what else could run.

python -m bench.verify_attention --out FILE [--layers 36] [--batch 1 8 32] [--width 16 4] [--context 256 1024 ...]

Shapes of Qwen3-8B, bfloat16, pages of one token that lie scattered over the pool, and a page table as wide as the
longest context that is served (`--longest`), which FlashAttention plans for. "verify" is causal, "draft" is not.
Per shape the time of all layers of one forward in a CUDA graph, the median of replays in turn, the launches of one
layer by kernel, and the largest difference to SGLang's call:

| kind | |
|---|---|
| per layer | SGLang's call, which finds a schedule in each layer |
| shared | one schedule for all layers (`dflash_sglang/patches/shared_schedule.py`) |
| one split | no context is split over thread blocks, so that no layer combines splits |
| flashinfer | FlashInfer's paged prefill, planned before |
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.graph_times import captured, replayed_in_turn
from dflash_sglang.patches.shared_schedule import SharedSchedules

HEADS, KV_HEADS, DIM = 32, 8, 128
REPLAYS = 30
PER_LAYER, SHARED, ONE_SPLIT, FLASHINFER = KINDS = ("per layer", "shared", "one split", "flashinfer")
Forward = Callable[[], torch.Tensor]  # all layers; the last one's output


@dataclass
class Shape:
    batch: int
    width: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.width} at {self.context}"


class Inputs:
    """One layer's tensors."""

    def __init__(self, shape: Shape, causal: bool, longest: int) -> None:
        self.shape, self.causal = shape, causal
        batch, width, self.seen = shape.batch, shape.width, shape.context + shape.width
        generator = torch.Generator(device="cuda").manual_seed(0)

        def rows(*size: int) -> torch.Tensor:
            return torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=generator)

        self.q = rows(batch * width, HEADS, DIM)
        self.k, self.v = (rows(batch * self.seen + 1, 1, KV_HEADS, DIM) for _ in range(2))
        self.page_table = torch.zeros((batch, max(longest, self.seen)), dtype=torch.int32, device="cuda")
        pages = 1 + torch.randperm(batch * self.seen, device="cuda", generator=generator)
        self.page_table[:, : self.seen] = pages.view(batch, self.seen)
        self.lengths = torch.full((batch,), self.seen, dtype=torch.int32, device="cuda")
        self.first_rows = torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device="cuda")


def flash(inputs: Inputs, layers: int, kind: str) -> Forward:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    shared = SharedSchedules(flash_attn_with_kvcache, get_scheduler_metadata)

    def forward() -> torch.Tensor:
        if kind == SHARED:
            shared.begin(inputs.lengths)
        for _ in range(layers):
            out = shared(
                q=inputs.q,
                k_cache=inputs.k,
                v_cache=inputs.v,
                page_table=inputs.page_table,
                cache_seqlens=inputs.lengths,
                cu_seqlens_q=inputs.first_rows,
                max_seqlen_q=inputs.shape.width,
                causal=inputs.causal,
                window_size=(-1, -1),
                softcap=0.0,
                num_splits=1 if kind == ONE_SPLIT else 0,
            )
        return out

    return forward


def flashinfer(inputs: Inputs, layers: int) -> Forward:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    batch = inputs.shape.batch
    pages = inputs.page_table[:, : inputs.seen].flatten().contiguous()
    first_pages = torch.arange(0, len(pages) + 1, inputs.seen, dtype=torch.int32, device="cuda")
    last_page_lens = torch.ones(batch, dtype=torch.int32, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"),
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=inputs.first_rows.clone(),
        paged_kv_indptr_buf=first_pages.clone(),
        paged_kv_indices_buf=pages.clone(),
        paged_kv_last_page_len_buf=last_page_lens.clone(),
    )
    wrapper.plan(
        inputs.first_rows, first_pages, pages, last_page_lens, HEADS, KV_HEADS, DIM, 1,
        causal=inputs.causal, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip

    def forward() -> torch.Tensor:
        for _ in range(layers):
            out = wrapper.run(inputs.q, (inputs.k, inputs.v))
        return out

    return forward


def forward_of(kind: str, inputs: Inputs, layers: int) -> Forward:
    return flashinfer(inputs, layers) if kind == FLASHINFER else flash(inputs, layers, kind)


def kernels_of(forward: Forward) -> dict[str, int]:
    """Launches by kernel name of one call."""
    for _ in range(2):  # a first profile misses events
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            forward()
            torch.cuda.synchronize()
    return {event.key[:60]: event.count for event in profile.key_averages()}


def measure(inputs: Inputs, layers: int, kinds: list[str]) -> dict[str, Any]:
    """{kind: {ms, kernels of one layer, difference}}"""
    expected = flash(inputs, 1, PER_LAYER)()
    figures: dict[str, Any] = {}
    graphs = {}
    for kind in kinds:
        graphs[kind], out = captured(forward_of(kind, inputs, layers))
        figures[kind] = {
            "kernels": kernels_of(forward_of(kind, inputs, 1)),
            "difference": float((out - expected).abs().max()),
        }
    for kind, times in replayed_in_turn(graphs, REPLAYS).items():
        figures[kind]["ms"] = round(statistics.median(times), 4)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--width", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024, 4096, 16384, 32768])
    parser.add_argument("--longest", type=int, default=40960, help="context that the page table has room for")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    claims: list[dict[str, Any]] = []
    status = 1
    for model, causal in (("verify", True), ("draft", False)):
        by_shape = figures.setdefault(model, {})
        for batch in arguments.batch:
            for width in arguments.width:
                for context in arguments.context:
                    shape = Shape(batch, width, context)
                    inputs = Inputs(shape, causal, arguments.longest)
                    found = by_shape[str(shape)] = measure(inputs, arguments.layers, arguments.kinds)
                    print(model, shape, {kind: figure["ms"] for kind, figure in found.items()}, flush=True)
                    if {PER_LAYER, SHARED} <= set(found):
                        ratio = found[SHARED]["ms"] / found[PER_LAYER]["ms"]
                        what = f"{model}, {shape}: time with one schedule for all layers over one for each"
                        claims.append(report.at_most(what, round(ratio, 4), 1.0))
                        what = f"{model}, {shape}: largest difference of outputs"
                        claims.append(report.at_most(what, found[SHARED]["difference"], 0.0))
                    # What is there, should the rest not come.
                    status = report.finish("bench.verify_attention", arguments.out, claims, figures=figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
