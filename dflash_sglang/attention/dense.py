"""Attention over a slot-addressed KV cache in torch operators: groups of queries, their masks, their product.

The queries of a forward are cut into groups that attend together: one padded group when every request has the
same number of queries (decode, verify, draft block), else one per request and stretch of queries (prefill).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

if TYPE_CHECKING:
    from dflash_sglang.kernels.block.grow_tree import Tree

# Queries of one request that attend together: bounds the mask, [queries * heads per kv head, context].
MAX_QUERIES = 256


@dataclass
class QueryGroup:
    """`rows` requests with `queries` queries each, which are consecutive positions or the nodes of a tree."""

    first_row: int  # of the group's queries among the forward's
    # [rows, context] int64; past a request's context its first slot, so that masked reads are finite.
    slots: torch.Tensor
    query_positions: torch.Tensor  # [rows, queries]; of a tree, the positions whose slots its nodes have
    context_lens: torch.Tensor  # [rows] positions 0 .. context_len-1 exist
    tree: Tree | None = None  # of at least `rows` requests, `queries` nodes each; read once a mask is asked for
    masks: dict[tuple[bool, int | None, int, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, causal: bool, window_left: int | None, heads: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask `[rows, 1, heads * queries, context]` (heads outer), or None if all is visible.

        A query at q sees keys k <= q when causal, every k of its context otherwise; with a window also
        |q - k| <= window_left. Of its tree, a causal node sees itself and its ancestors, and q and k count depths.
        """
        key = (causal, window_left, heads, dtype)
        if key not in self.masks:
            self.masks[key] = self._build_mask(causal, window_left, heads, dtype)
        return self.masks[key]

    def _build_mask(
        self, causal: bool, window_left: int | None, heads: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        rows, queries = self.query_positions.shape
        keys = torch.arange(self.slots.shape[1])
        distance, before = self._distances(keys)
        visible = (keys < self.context_lens[:, None])[:, None, :].expand_as(distance)
        if causal:
            visible = visible & before
        if window_left is not None:
            visible = visible & (distance.abs() <= window_left)
        if bool(visible.all()):
            return None
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return mask[:, None, None].expand(rows, 1, heads, queries, -1).reshape(rows, 1, heads * queries, -1)

    def _distances(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries to keys, and whether a key is the query's own or one before it: [rows, queries, context]."""
        rows, queries = self.query_positions.shape
        if self.tree is None:
            distance = self.query_positions[:, :, None] - keys
            return distance, distance >= 0
        prefix, depths = self.query_positions[:, :1], self.tree.depths[:rows].long()
        node = keys - prefix  # [rows, context]; keys of the prefix are no nodes
        in_tree = (node >= 0) & (node < queries)
        node = node.clamp(0, queries - 1)
        key_positions = torch.where(in_tree, prefix + depths.gather(1, node), keys)
        distance = (prefix + depths)[:, :, None] - key_positions[:, None]
        above = (self.tree.ancestors[:rows, :, None] >> node[:, None]) & 1 == 1
        return distance, above | ~in_tree[:, None]


def group_queries(
    req_to_token: torch.Tensor,  # [requests, context] slot of each position
    req_pool_indices: torch.Tensor,  # [bs]
    prefix_lens: list[int],
    query_lens: list[int],
    tree: Tree | None = None,
) -> list[QueryGroup]:
    """Cuts a forward's queries, which lie request after request, into groups.

    Request i's queries are at the last positions of its context: prefix_lens[i] + 0 .. query_lens[i] - 1.
    With a tree they are its nodes, as many for each request and MAX_QUERIES at most.
    """
    rows, prefixes = req_pool_indices.long(), torch.tensor(prefix_lens, dtype=torch.int64)
    contexts = prefixes + torch.tensor(query_lens, dtype=torch.int64)
    if query_lens and min(query_lens) == max(query_lens) <= MAX_QUERIES:
        positions = prefixes[:, None] + torch.arange(query_lens[0])
        return [_group(req_to_token, rows, contexts, positions, first_row=0, tree=tree)]
    groups = []
    first_row = 0
    for i, (context, queries) in enumerate(zip(contexts.tolist(), query_lens, strict=True)):
        for first in range(context - queries, context, MAX_QUERIES):
            positions = torch.arange(first, min(first + MAX_QUERIES, context))[None]
            groups.append(_group(req_to_token, rows[i : i + 1], contexts[i : i + 1], positions, first_row))
            first_row += positions.shape[1]
    return groups


def _group(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    context_lens: torch.Tensor,
    query_positions: torch.Tensor,
    first_row: int,
    tree: Tree | None = None,
) -> QueryGroup:
    longest = int(context_lens.max())
    slots = req_to_token[rows, :longest].long()
    slots = torch.where(torch.arange(longest) < context_lens[:, None], slots, slots[:, :1])
    return QueryGroup(first_row, slots, query_positions, context_lens, tree)


def attend(
    query: torch.Tensor,  # [tokens, heads, head_dim]
    key_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [slots, kv_heads, v_head_dim]
    groups: list[QueryGroup],
    *,
    causal: bool,
    window_left: int | None,
    scale: float,
    sinks: torch.Tensor | None = None,  # [heads] logits that take weight from the keys, and have no value
) -> torch.Tensor:
    """Returns `[tokens, heads, v_head_dim]`; rows that no group covers (padding) are zero."""
    tokens, heads, head_dim = query.shape
    kv_heads, v_head_dim = value_cache.shape[1:]
    shared = heads // kv_heads
    output = query.new_zeros(tokens, heads, v_head_dim)
    for group in groups:
        (rows, queries), context = group.query_positions.shape, group.slots.shape[1]
        span = slice(group.first_row, group.first_row + rows * queries)
        flat = group.slots.reshape(-1)
        # The query heads that share a kv head become rows of one product.
        q = query[span].view(rows, queries, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
        k = key_cache.index_select(0, flat).view(rows, context, kv_heads, head_dim)
        v = value_cache.index_select(0, flat).view(rows, context, kv_heads, v_head_dim)
        k, v = k.to(query.dtype).transpose(1, 2), v.to(query.dtype).transpose(1, 2)
        mask = group.mask(causal, window_left, shared, query.dtype)
        if sinks is not None:
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
            mask = _with_sinks(mask, sinks.to(query.dtype).view(kv_heads, shared), rows, queries, context)
        out = scaled_dot_product_attention(
            q.reshape(rows, kv_heads, shared * queries, head_dim), k, v, attn_mask=mask, scale=scale
        )
        out = out.view(rows, kv_heads, shared, queries, v_head_dim).permute(0, 3, 1, 2, 4)
        output[span] = out.reshape(rows * queries, heads, v_head_dim)
    return output


def _with_sinks(
    mask: torch.Tensor | None, sinks: torch.Tensor, rows: int, queries: int, context: int
) -> torch.Tensor:
    """A sink is one key more, whose score is its logit: `[rows, kv_heads, shared * queries, context + 1]`."""
    kv_heads, shared = sinks.shape
    scores = sinks.new_zeros(rows, kv_heads, shared * queries, context + 1)
    if mask is not None:
        scores[..., :context] = mask
    scores[..., context] = sinks.repeat_interleave(queries, dim=1)
    return scores
