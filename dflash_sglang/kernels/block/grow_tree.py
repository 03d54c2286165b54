"""The likeliest tree of proposals of each request, grown from marginals of the positions in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_sglang.kernels.head.pack_shard import LOW_BITS, Candidates, sortable
from dflash_sglang.settings.width import MAX_NODES

# Of a candidate's rank, place in the order of pops: depth, rank and parent in the low 32 bits of its key.
_PARENT_BITS, _RANK_BITS = 6, 14
_MAX_CANDIDATES = (1 << _RANK_BITS) - 1
_MAX_STEPS = (1 << (31 - _PARENT_BITS - _RANK_BITS)) - 1
_NEVER = torch.iinfo(torch.int64).min


class Tree(NamedTuple):
    """The nodes of each request's tree. Node 0 is the root, the last committed token; parents come first.

    Where the candidates ran out, padding follows: it has no parent, the depth and the token of the root, mass
    -inf, and only itself among its ancestors. `accept` never accepts it.
    """

    parents: Tensor  # [bs, N] int32, -1 of the root and of padding
    depths: Tensor  # [bs, N] int32, 0 of the root
    ancestors: Tensor  # [bs, N] int64, bit j: node j is this node or above it
    mass: Tensor  # [bs, N] float32, the logprob of the node and those above it, 0 of the root


def grow_tree(anchors: Tensor, candidates: Candidates, tokens: Tensor, tree: Tree) -> None:
    """Write the N likeliest nodes of each request to tokens [bs, N] int64 and `tree`. N is at most MAX_NODES.

    anchors [bs]: the last committed tokens. candidates [bs, steps, K]: of each proposed position.
    The probability of a node is the product of its token's and those of the tokens above it. Nodes are popped one
    by one, each the likeliest child of those before it: the larger mass first, then the shallower node, the lower
    rank among the candidates, the lower index of the parent. So the tree of N nodes is the first N nodes of every
    larger one.

    Raises ValueError for more nodes, steps or candidates than a key holds.
    """
    nodes, (_, steps, count) = tokens.shape[1], candidates.ids.shape
    if nodes > MAX_NODES or steps > _MAX_STEPS or count > _MAX_CANDIDATES:
        raise ValueError(
            f"a tree of {nodes} nodes over {steps} steps of {count} candidates: expected at most {MAX_NODES} "
            f"nodes, {_MAX_STEPS} steps and {_MAX_CANDIDATES} candidates. Ask for less."
        )
    launch = grow_tree_triton if tokens.is_cuda else grow_tree_torch
    launch(anchors, candidates, tokens, tree)


def grow_tree_torch(anchors: Tensor, candidates: Candidates, tokens: Tensor, tree: Tree) -> None:
    """The definition of `grow_tree` in torch operations.

    A node's children are popped by rank, so each node offers one at a time: its first, then the next sibling.
    """
    (bs, nodes), (_, steps, count) = tokens.shape, candidates.ids.shape
    parents, depths, ancestors, mass = tree
    tokens[:] = anchors[:, None]
    parents.fill_(-1)
    depths.zero_()
    ancestors[:] = torch.ones_like(ancestors) << torch.arange(nodes, device=tokens.device)
    mass.fill_(float("-inf"))
    mass[:, 0] = 0.0
    # Past the last step and the last rank there is no candidate.
    logprobs = torch.nn.functional.pad(candidates.logprobs, (0, 1, 0, 1), value=float("-inf"))
    request, node = torch.arange(bs, device=tokens.device), torch.arange(nodes, device=tokens.device)
    ranks = torch.zeros_like(parents)  # of the child that each node offers
    for popped in range(1, nodes):
        offered = mass + logprobs[request[:, None], depths.long(), ranks.long()]
        place = ((depths + 1).long() << (_PARENT_BITS + _RANK_BITS)) | (ranks.long() << _PARENT_BITS) | node
        key = (sortable.fn((offered + 0.0).view(torch.int32)).long() << 32) | (LOW_BITS - place)
        key = torch.where(offered > float("-inf"), key, _NEVER)
        best, parent = key.max(dim=1)
        live = best != _NEVER
        step, rank = depths[request, parent].long(), ranks[request, parent].long()
        child = candidates.ids[request, step.clamp(max=steps - 1), rank.clamp(max=count - 1)]
        tokens[:, popped] = torch.where(live, child, tokens[:, popped])
        parents[:, popped] = torch.where(live, parent, -1)
        depths[:, popped] = torch.where(live, step + 1, 0)
        ancestors[:, popped] |= torch.where(live, ancestors[request, parent], 0)
        mass[:, popped] = torch.where(live, offered[request, parent], float("-inf"))
        ranks[request, parent] += live


def grow_tree_triton(anchors: Tensor, candidates: Candidates, tokens: Tensor, tree: Tree) -> None:
    """`grow_tree` as one Triton launch, one program per request."""
    bs, nodes = tokens.shape
    _, steps, count = candidates.ids.shape
    _grow_tree_kernel[(bs,)](
        anchors, *candidates, tokens, *tree, anchors.stride(0), steps,
        NODES=nodes, LANES=triton.next_power_of_2(nodes), COUNT=count, PARENT_BITS=_PARENT_BITS,
        RANK_BITS=_RANK_BITS, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["anchor_stride", "steps"])
def _grow_tree_kernel(
    anchors_ptr, ids_ptr, logprobs_ptr, tokens_ptr, parents_ptr, depths_ptr, ancestors_ptr, mass_ptr,
    anchor_stride, steps,
    NODES: tl.constexpr, LANES: tl.constexpr, COUNT: tl.constexpr, PARENT_BITS: tl.constexpr,
    RANK_BITS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    first = request * steps * COUNT
    # Of each node, in its own lane: what it is, and the child that it offers next.
    lane = tl.arange(0, LANES)
    tokens = tl.zeros((LANES,), tl.int64) + tl.load(anchors_ptr + request * anchor_stride).to(tl.int64)
    parents = tl.full((LANES,), -1, tl.int32)
    depths = tl.zeros((LANES,), tl.int32)
    ancestors = tl.full((LANES,), 1, tl.int64) << lane.to(tl.int64)
    mass = tl.where(lane == 0, 0.0, float("-inf"))
    ranks = tl.zeros((LANES,), tl.int32)
    offered = mass + tl.load(logprobs_ptr + first, mask=steps > 0, other=float("-inf"))
    for popped in range(1, NODES):
        place = ((depths + 1) << (PARENT_BITS + RANK_BITS)) | (ranks << PARENT_BITS) | lane
        key = sortable((offered + 0.0).to(tl.int32, bitcast=True)).to(tl.int64) << 32
        key = tl.where(offered > float("-inf"), key | (0xFFFFFFFF - place.to(tl.int64)), -9223372036854775808)
        best = tl.max(key, axis=0)
        if best != -9223372036854775808:
            place_of_best = (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
            parent = place_of_best & ((1 << PARENT_BITS) - 1)
            rank = (place_of_best >> PARENT_BITS) & ((1 << RANK_BITS) - 1)
            depth = place_of_best >> (PARENT_BITS + RANK_BITS)
            at = first + (depth - 1) * COUNT + rank
            sibling = tl.load(logprobs_ptr + at + 1, mask=rank + 1 < COUNT, other=float("-inf"))
            child = tl.load(logprobs_ptr + first + depth * COUNT, mask=depth < steps, other=float("-inf"))
            token = tl.load(ids_ptr + at)
            mass_of_best = sortable((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            above = tl.sum(tl.where(lane == parent, ancestors, 0), axis=0)
            ranks = tl.where(lane == parent, rank + 1, ranks)
            offered = tl.where(lane == parent, mass + sibling, offered)
            new = lane == popped
            tokens = tl.where(new, token, tokens)
            parents = tl.where(new, parent, parents)
            depths = tl.where(new, depth, depths)
            ancestors = tl.where(new, ancestors | above, ancestors)
            mass = tl.where(new, mass_of_best, mass)
            offered = tl.where(new, mass_of_best + child, offered)
    out = request * NODES + lane
    tl.store(tokens_ptr + out, tokens, mask=lane < NODES)
    tl.store(parents_ptr + out, parents, mask=lane < NODES)
    tl.store(depths_ptr + out, depths, mask=lane < NODES)
    tl.store(ancestors_ptr + out, ancestors, mask=lane < NODES)
    tl.store(mass_ptr + out, mass, mask=lane < NODES)
