"""Attention of a tree's nodes: what they see of the tree is added to their attention over the prefix."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
_TILE_NODES = 16  # nodes of one program
_TILE_ROWS = 64  # queries of one program: nodes times the query heads of a KV head
_TILE_VALUES = 32 * 128  # of keys that a program reads at a time


class Prefix(NamedTuple):
    """Attention of all rows to the prefixes of their requests, as FlashAttention gives it."""

    out: Tensor  # [bs * nodes, heads, dim]
    lse: Tensor  # [heads, bs * nodes] float32: natural logarithm of the softmax's denominator, -inf where empty


class TreeKeys(NamedTuple):
    """The nodes' own keys and values, where the forward has written them."""

    keys: Tensor  # [slots of the pool, kv_heads, dim]
    values: Tensor  # [slots of the pool, kv_heads, dim]
    slots: Tensor  # [bs, nodes] integers
    ancestors: Tensor  # [bs, nodes] int64: bit j of node i is set where node j is node i or above it


def add_tree_keys(queries: Tensor, prefix: Prefix, tree: TreeKeys, scale: float) -> None:
    """Let each node attend to itself and its ancestors besides its prefix: `prefix.out` becomes the attention to
    all of them, in place. `prefix.lse` stays as it is.

    queries [bs * nodes, heads, dim], with any stride between rows. scale: of the softmax.
    Node 0 is the root of all others, and parents come before their children. Prefixes may be empty. dim is one of
    HEAD_DIMS, heads a multiple of kv_heads, nodes at most 64 (`attention.trees.why_no_trees`).
    """
    launch = add_tree_keys_triton if queries.is_cuda else add_tree_keys_torch
    launch(queries, prefix, tree, scale)


def add_tree_keys_torch(queries: Tensor, prefix: Prefix, tree: TreeKeys, scale: float) -> None:
    """The definition of `add_tree_keys` in torch operations."""
    bs, nodes = tree.slots.shape
    kv_heads, dim = tree.keys.shape[1:]
    lse = prefix.lse.view(kv_heads, -1, bs, nodes).permute(2, 3, 0, 1).unsqueeze(-1)  # [.., kv_heads, group, 1]
    prefixes = prefix.out.view(*lse.shape[:-1], dim).float()
    keys, values = (pool[tree.slots.long()].float() for pool in (tree.keys, tree.values))
    scores = torch.einsum("bihgd,bjhd->bihgj", queries.reshape(prefixes.shape).float(), keys) * scale
    visible = (tree.ancestors[:, :, None] >> torch.arange(nodes, device=lse.device)) & 1 == 1
    scores = scores.masked_fill(~visible[:, :, None, None], -torch.inf)
    largest = torch.maximum(lse, scores.amax(dim=-1, keepdim=True))
    of_prefix, weights = (lse - largest).exp(), (scores - largest).exp()
    total = of_prefix + weights.sum(dim=-1, keepdim=True)
    prefixes = torch.where(of_prefix > 0, prefixes * of_prefix, 0.0)
    out = (prefixes + torch.einsum("bihgj,bjhd->bihgd", weights, values)) / total
    prefix.out.copy_(out.view(prefix.out.shape))


def add_tree_keys_triton(queries: Tensor, prefix: Prefix, tree: TreeKeys, scale: float) -> None:
    """`add_tree_keys` as one Triton launch: a program for some nodes of a request and one of its KV heads, with
    all query heads of that KV head."""
    bs, nodes = tree.slots.shape
    kv_heads, dim = tree.keys.shape[1:]
    group = queries.shape[1] // kv_heads
    padded = triton.next_power_of_2(group)
    tile = max(1, min(_TILE_NODES, _TILE_ROWS // padded))
    _add_tree_keys_kernel[(triton.cdiv(nodes, tile), kv_heads, bs)](
        queries, *prefix, *tree, scale,
        *queries.stride()[:2], *prefix.out.stride()[:2], prefix.lse.stride(0),
        *tree.keys.stride()[:2], *tree.values.stride()[:2],
        NODES=nodes, GROUP=group, PADDED=padded, TILE=tile, DIM=dim,
        KEYS=max(16, min(triton.next_power_of_2(nodes), _TILE_VALUES // dim)), num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit
def _add_tree_keys_kernel(
    queries_ptr, out_ptr, lse_ptr, keys_ptr, values_ptr, slots_ptr, ancestors_ptr, scale,
    query_row, query_head: tl.constexpr, out_row: tl.constexpr, out_head: tl.constexpr, lse_head,
    key_slot: tl.constexpr, key_head: tl.constexpr, value_slot: tl.constexpr, value_head: tl.constexpr,
    NODES: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Online softmax that starts from the prefix: its output, with its LSE as the largest score.

    An empty prefix weighs nothing once the root is seen, which is among the first keys of every node.
    """
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    first = tl.program_id(0) * TILE
    at = tl.arange(0, TILE * PADDED)
    node, in_group = first + at // PADDED, at % PADDED
    there = (node < NODES) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    row = (request * NODES + node).to(tl.int64)
    dims = tl.arange(0, DIM)
    of_queries = queries_ptr + (row * query_row + head * query_head)[:, None] + dims[None, :]
    query = tl.load(of_queries, mask=there[:, None], other=0.0)
    of_out = out_ptr + (row * out_row + head * out_head)[:, None] + dims[None, :]
    largest = tl.load(lse_ptr + head * lse_head + row, mask=there, other=-float("inf"))
    out = tl.load(of_out, mask=there[:, None], other=0.0).to(tl.float32)
    out = tl.where(largest[:, None] == -float("inf"), 0.0, out)
    total = tl.full((TILE * PADDED,), 1.0, tl.float32)
    ancestors = tl.load(ancestors_ptr + row, mask=there, other=0)
    for start in range(0, tl.minimum(first + TILE, NODES), KEYS):
        key_node = start + tl.arange(0, KEYS)
        in_tree = key_node < NODES
        slot = tl.load(slots_ptr + request * NODES + key_node, mask=in_tree, other=0).to(tl.int64)
        of_keys = keys_ptr + (slot * key_slot + kv_head * key_head)[:, None] + dims[None, :]
        of_values = values_ptr + (slot * value_slot + kv_head * value_head)[:, None] + dims[None, :]
        key = tl.load(of_keys, mask=in_tree[:, None], other=0.0)
        value = tl.load(of_values, mask=in_tree[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        visible = ((ancestors[:, None] >> key_node[None, :].to(tl.int64)) & 1) == 1
        scores = tl.where(visible, scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        shrunk = tl.exp(largest - now)
        weights = tl.exp(scores - now[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        out = tl.dot(weights.to(value.dtype), value, out * shrunk[:, None], input_precision="ieee")
        largest = now
    tl.store(of_out, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=there[:, None])
