"""Attention of a verify over trees, in the ways that there are, against that over a chain.

python -m bench.verify_attention [--out FILE] [--nodes 16 32 64] [--requests 1 2 4 8] [--contexts 256 4096 32768]
                                 [--page-size 1] [--layers 36] [--device cpu --context-length N ...]

No server: the attention of all layers of Qwen3-8B, captured as one CUDA graph.

| kind | per layer |
|---|---|
| chain | one causal call of FlashAttention 3 over prefix and rows, as a verify does today |
| prefix + merge | a call over the prefix that gives its LSE, then `add_tree_keys`, as trees are verified |
| prefix + UNO's merge | the same call, then SGLang's `merge_suffix_attention_in_place` |
| cascade | SGLang's way with topk > 1: a call over the prefix, one with each node as a sequence, their merge |

The first three share one schedule of tiles among the layers and read queries where the projection left them, as
this package has it (`patches/flash3.py`). The cascade does neither, as in SGLang. What SGLang prepares of a step
on the host, which costs the cascade about 20 launches more, is not measured.

First the outputs of all kinds are held against dense attention in float32, for random trees and for chains, over
prefixes of 0 to 300 tokens. Then each cell of nodes, requests and context gets microseconds of a step: the median
of replays, the kinds in turn. Slots are scattered over the pools. Prefixes that fit into the L2 cache stay there
between replays, for all kinds alike.

On a CPU, `chain` and `prefix + merge` are checked with torch forms, and nothing is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import report
from bench.rejection import captured
from dflash_sglang.bench.script import script_parser
from dflash_sglang.kernels.attention.tree_keys import Prefix
from dflash_sglang.patches.flash3 import SharedSchedules

CHAIN, MERGE, UNO, CASCADE = "chain", "prefix + merge", "prefix + UNO's merge", "cascade"
CHECKED = (0, 1, 37, 300)  # lengths of the prefixes of the check
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}
OVERHEAD_US = {16: 250, 32: 350}  # of a step of one request over a chain's, by nodes
ROUNDS, REPLAYS = 5, 20


class Step(NamedTuple):
    """What the layers of one verify share. rows = bs * nodes."""

    queries: Tensor  # [rows, heads, dim], a slice of the projection's rows
    page_size: int
    page_table: Tensor  # [bs, pages of the longest context] int32
    prefix_lens: Tensor  # [bs] int32
    lens: Tensor  # [bs] int32, with the nodes
    starts: Tensor  # [bs + 1] int32: the requests' first rows
    slots: Tensor  # [bs, nodes] int64
    ancestors: Tensor  # [bs, nodes] int64
    # A node as a sequence of its own: SGLang's form of a tree.
    seen_slots: Tensor  # [rows, nodes] int32: ancestors first
    seen_lens: Tensor  # [rows] int32
    row_starts: Tensor  # [rows + 1] int32


class Layer(NamedTuple):
    keys: Tensor  # [slots, kv_heads, dim]
    values: Tensor  # [slots, kv_heads, dim]


Attend = Callable[..., Any]  # as FlashAttention's `flash_attn_with_kvcache`


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 4096, 32768])
    parser.add_argument("--context-length", type=int, default=40960, help="of the page table")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    longest = max(*arguments.contexts, *CHECKED) + max(arguments.nodes)
    if arguments.context_length < longest:
        parser.error(
            f"--context-length {arguments.context_length}: expected the longest context or more, {longest}"
        )
    with torch.device(arguments.device):
        figures, claims = measure(arguments)
    return report.finish("bench.verify_attention", arguments.out, claims, figures=figures)


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures and claims."""
    torch.manual_seed(0)
    layers, ways = pools(arguments), kinds(arguments.device)
    bound = TOLERANCE[getattr(torch, arguments.dtype)]
    checks = {nodes: check(ways, layers, nodes, arguments) for nodes in arguments.nodes}
    claims = [
        report.at_most(f"{name}, {nodes} nodes: largest difference to dense attention", max(of.values()), bound)
        for nodes, found in checks.items()
        for name, of in found.items()
    ]
    if arguments.device == "cpu":
        return {"difference": checks}, claims
    steps = []
    for nodes, requests, context in itertools.product(arguments.nodes, arguments.requests, arguments.contexts):
        step = new_step([context] * requests, [random_tree(nodes)] * requests, arguments)
        us = microseconds(ways, step, layers)
        steps.append(dict(nodes=nodes, requests=requests, context=context, us=us))
        print(json.dumps(steps[-1]), flush=True)
    return {"difference": checks, "steps": steps}, claims + overheads(steps)


def overheads(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Claims: what a tree of one request costs over a chain of as many rows."""
    return [
        report.at_most(
            f"{MERGE} over {CHAIN}, 1 request, {step['nodes']} nodes, context {step['context']}: us of a step",
            round(step["us"][MERGE] - step["us"][CHAIN], 1),
            OVERHEAD_US[step["nodes"]],
        )
        for step in steps
        if step["requests"] == 1 and step["nodes"] in OVERHEAD_US
    ]


def pools(arguments: argparse.Namespace) -> list[Layer]:
    """Keys and values of all layers, of as many slots as the largest step has."""
    nodes, page = max(arguments.nodes), arguments.page_size
    checked = sum(pages_of(length + nodes, page) for length in CHECKED)
    timed = max(arguments.requests) * pages_of(max(arguments.contexts) + nodes, page)
    shape = (max(checked, timed) * page, arguments.kv_heads, arguments.head_dim)
    dtype = getattr(torch, arguments.dtype)
    return [
        Layer(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in range(arguments.layers)
    ]


def pages_of(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def chain_tree(nodes: int) -> list[int]:
    """Parents; the root's is -1."""
    return list(range(-1, nodes - 1))


def random_tree(nodes: int) -> list[int]:
    rng = random.Random(nodes)
    return [-1, *(rng.randrange(node) for node in range(1, nodes))]


def new_step(prefix_lens: Sequence[int], trees: Sequence[Sequence[int]], arguments: argparse.Namespace) -> Step:
    """Of requests whose pages lie anywhere in the pools. trees: the parents of each request's nodes."""
    bs, nodes, page, dim = len(trees), len(trees[0]), arguments.page_size, arguments.head_dim
    heads, rows = arguments.heads, bs * nodes
    counts = [pages_of(length + nodes, page) for length in prefix_lens]
    pages = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
    page_table = torch.zeros(bs, pages_of(arguments.context_length, page), dtype=torch.int32)
    for row, mine in zip(page_table, pages, strict=True):
        row[: len(mine)] = mine
    lengths = torch.tensor(prefix_lens, dtype=torch.int32)
    places = lengths[:, None] + torch.arange(nodes)
    slots = page_table.gather(1, places // page).long() * page + places % page
    above = torch.zeros(bs, nodes, nodes, dtype=torch.bool)
    for of_request, parents in zip(above, trees, strict=True):
        for node, parent in enumerate(parents):
            if parent >= 0:
                of_request[node] = of_request[parent]
            of_request[node, node] = True
    order = (~above).int().argsort(dim=-1, stable=True)
    projected = torch.randn(rows, (heads + 2 * arguments.kv_heads) * dim, dtype=getattr(torch, arguments.dtype))
    return Step(
        queries=projected[:, : heads * dim].view(rows, heads, dim),
        page_size=page,
        page_table=page_table,
        prefix_lens=lengths,
        lens=lengths + nodes,
        starts=torch.arange(0, rows + 1, nodes, dtype=torch.int32),
        slots=slots,
        ancestors=(above.long() << torch.arange(nodes)).sum(dim=-1),
        seen_slots=slots[:, None].expand(-1, nodes, -1).gather(2, order).view(rows, nodes).int(),
        seen_lens=above.sum(dim=-1, dtype=torch.int32).view(rows),
        row_starts=torch.arange(rows + 1, dtype=torch.int32),
    )


class Kind(NamedTuple):
    begin: Callable[[Step], None]  # before the first layer
    attend: Callable[[Step, Layer], Tensor]  # the output [rows, heads, dim]


def kinds(device: str) -> dict[str, Kind]:
    attend = SharedSchedules(torch_attention, lambda **call: torch.zeros(1))
    if device == "cuda":
        from sgl_kernel.flash_attn import get_scheduler_metadata
        from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache

        attend = SharedSchedules(flash_attn_with_kvcache, get_scheduler_metadata)
    found = {
        CHAIN: Kind(lambda step: attend.begin(step.lens), lambda step, layer: chain(step, layer, attend)),
        MERGE: Kind(lambda step: attend.begin(step.prefix_lens), lambda step, layer: merged(step, layer, attend)),
    }
    if device == "cuda":
        found[UNO] = Kind(
            lambda step: attend.begin(step.prefix_lens), lambda step, layer: merged_by_uno(step, layer, attend)
        )
        found[CASCADE] = Kind(lambda step: None, lambda step, layer: cascade(step, layer, flash_attn_with_kvcache))
    return found


def run(kind: Kind, step: Step, layers: Sequence[Layer]) -> list[Tensor]:
    kind.begin(step)
    return [kind.attend(step, layer) for layer in layers]


def scale(step: Step) -> float:
    return float(step.queries.shape[-1] ** -0.5)


def over_requests(step: Step, layer: Layer) -> dict[str, Any]:
    """Arguments of a call with a request as a sequence."""
    return dict(
        q=step.queries,
        k_cache=layer.keys.unflatten(0, (-1, step.page_size)),
        v_cache=layer.values.unflatten(0, (-1, step.page_size)),
        page_table=step.page_table,
        cu_seqlens_q=step.starts,
        max_seqlen_q=step.slots.shape[1],
        softmax_scale=scale(step),
        window_size=(-1, -1),
        softcap=0.0,
        num_splits=0,
    )


def chain(step: Step, layer: Layer, attend: Attend) -> Tensor:
    out: Tensor = attend(**over_requests(step, layer), cache_seqlens=step.lens, causal=True)
    return out


def over_prefix(step: Step, layer: Layer, attend: Attend, **changed: Any) -> Prefix:
    call = {**over_requests(step, layer), **changed}
    out, lse, *_ = attend(**call, cache_seqlens=step.prefix_lens, causal=False, return_softmax_lse=True)
    return Prefix(out, lse)


def merged(step: Step, layer: Layer, attend: SharedSchedules) -> Tensor:
    with attend.over_trees(step.ancestors, step.slots):
        out: Tensor = attend(**over_requests(step, layer), cache_seqlens=step.prefix_lens, causal=True)
    return out


def merged_by_uno(step: Step, layer: Layer, attend: Attend) -> Tensor:
    from sglang.kernels.ops.attention.suffix_attention_merge import merge_suffix_attention_in_place

    prefix = over_prefix(step, layer, attend)
    merge_suffix_attention_in_place(
        q=step.queries,
        k_cache=layer.keys,
        v_cache=layer.values,
        suffix_page_table=step.seen_slots,
        suffix_cache_seqlens=step.seen_lens,
        prefix=prefix.out,
        prefix_lse=prefix.lse,
        softmax_scale=scale(step),
    )
    return prefix.out


def cascade(step: Step, layer: Layer, attend: Attend) -> Tensor:
    """With the copies of SGLang's backend, which makes queries contiguous before each call."""
    from sgl_kernel import merge_state_v2
    from sglang.srt.mem_cache.layout.paged_view import paged_view

    prefix = over_prefix(step, layer, attend, q=step.queries.contiguous())
    nodes = dict(
        q=step.queries.contiguous(),
        k_cache=paged_view(layer.keys, 1),
        v_cache=paged_view(layer.values, 1),
        page_table=step.seen_slots,
        cu_seqlens_q=step.row_starts,
        max_seqlen_q=1,
    )
    call = {**over_requests(step, layer), **nodes}
    out, lse, *_ = attend(**call, cache_seqlens=step.seen_lens, causal=False, return_softmax_lse=True)
    both: Tensor = merge_state_v2(prefix.out, prefix.lse.T.contiguous(), out, lse.T.contiguous())[0]
    return both


def torch_attention(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    return_softmax_lse: bool = False,
    **rest: Any,
) -> Any:
    """Stands for FlashAttention on a CPU, where requests have `max_seqlen_q` queries each.

    A row that sees nothing has no numbers in its output, and -inf as its LSE.
    """
    del rest
    bs, (rows, heads, dim), queries = len(cache_seqlens), q.shape, max_seqlen_q
    pools = (pool[page_table.long()].flatten(1, 2) for pool in (k_cache, v_cache))
    keys, values = (pool.repeat_interleave(heads // pool.shape[2], dim=2) for pool in pools)
    scores = torch.einsum("bihd,bjhd->bhij", q.reshape(bs, queries, heads, dim), keys) * softmax_scale
    lengths, place = cache_seqlens[:, None, None], torch.arange(keys.shape[1])
    last = lengths - queries + torch.arange(queries)[:, None] if causal else lengths - 1
    scores = scores.masked_fill((place > last)[:, None], -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), values).reshape(rows, heads, dim)
    return (out, scores.logsumexp(dim=-1).transpose(0, 1).flatten(1)) if return_softmax_lse else out


def dense(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The output [rows, heads, dim] in float32.

    queries [rows, heads, dim], keys and values [tokens, kv_heads, dim], visible [rows, tokens].
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("ihd,jhd->hij", queries.float(), keys) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1), values)


def dense_tree(step: Step, layer: Layer) -> Tensor:
    """What every kind has to give. [rows, heads, dim] float32"""
    nodes = step.slots.shape[1]
    above = (step.ancestors[..., None] >> torch.arange(nodes)) & 1 == 1
    found = []
    for request, queries in enumerate(step.queries.split(nodes)):
        places = torch.arange(int(step.prefix_lens[request]))
        prefix = step.page_table[request, places // step.page_size] * step.page_size + places % step.page_size
        seen = torch.cat([prefix.long(), step.slots[request]])
        visible = torch.cat([torch.ones(nodes, len(prefix), dtype=torch.bool), above[request]], dim=1)
        found.append(dense(queries, layer.keys[seen], layer.values[seen], visible, scale(step)))
    return torch.cat(found)


def check(
    ways: Mapping[str, Kind], layers: Sequence[Layer], nodes: int, arguments: argparse.Namespace
) -> dict[str, dict[int, float]]:
    """{kind: {length of the prefix: the largest difference of an output}}. A chain is all that `chain` serves."""
    found = {name: dict.fromkeys(CHECKED, 0.0) for name in ways}
    for tree in (chain_tree(nodes), random_tree(nodes)):
        step = new_step(CHECKED, [tree] * len(CHECKED), arguments)
        expected = [dense_tree(step, layer) for layer in layers]
        for name, kind in ways.items():
            if name == CHAIN and tree != chain_tree(nodes):
                continue
            for out, right in zip(run(kind, step, layers), expected, strict=True):
                differences = (out.float() - right).abs().nan_to_num(torch.inf).view(len(CHECKED), -1).amax(dim=1)
                for length, worst in zip(CHECKED, differences.tolist(), strict=True):
                    found[name][length] = max(found[name][length], round(worst, 7))
    return found


def microseconds(ways: Mapping[str, Kind], step: Step, layers: Sequence[Layer]) -> dict[str, float]:
    """Of a step by kind."""

    def graph(kind: Kind) -> torch.cuda.CUDAGraph:
        return captured(lambda: run(kind, step, layers))

    graphs = {name: graph(kind) for name, kind in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, of_kind in graphs.items():
            of_kind.replay()
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)]
            for begin, end in events:
                begin.record()
                of_kind.replay()
                end.record()
            torch.cuda.synchronize()
            times[name] += [begin.elapsed_time(end) * 1000 for begin, end in events]
    return {name: round(statistics.median(of), 1) for name, of in times.items()}


if __name__ == "__main__":
    sys.exit(main())
