"""Accept in one launch: what each verified block commits, where the next step and the host read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_sglang.kernels.block.grow_tree import Tree


class Outcomes(NamedTuple):
    """What steps commit, in `places` that they write in turn: the host copies one while the next step runs.

    The committed tokens of request b are the first `commit_lens[b]` from `token_ids[b * block]` on.
    """

    token_ids: Tensor  # [places, max_requests * block] int64
    commit_lens: Tensor  # [places, max_requests] int32, accepted proposals + 1
    bonus_tokens: Tensor  # [places, max_requests] int64, the last committed token
    new_seq_lens: Tensor  # [places, max_requests] int64, prefix + commit


class Relay(NamedTuple):
    """The last outcome of each row of `req_to_token`, from which SGLang starts the next step. [rows] int64."""

    new_seq_lens: Tensor
    bonus_tokens: Tensor


class Ragged(NamedTuple):
    """Of each request its first rows alone were verified: `tokens` and `target_ids` are [rows], request after
    request."""

    starts: Tensor  # [at least bs] int32, the first row of each request
    lens: Tensor  # [bs] int32, its rows; none for what pads the batch
    block: int  # rows that are reserved for each request among the outcomes, at least as many as any has

    def dense(self, rows: Tensor, width: int) -> Tensor:
        """rows [rows, ...] -> [bs, width, ...] of blocks of so many rows, 0 where a request has no row."""
        lane = torch.arange(width, device=rows.device)
        lens = self.lens.long()[:, None]
        index = self.starts[: len(lens)].long()[:, None] + lane
        there = (lane < lens).view(*index.shape, *[1] * (rows.dim() - 1))
        return torch.where(there, rows[index.clamp(max=len(rows) - 1)], 0)


class Verification(NamedTuple):
    """A step's verified blocks. Row i proposes `tokens[:, i + 1]`, the target answers `target_ids[:, i]`."""

    tokens: Tensor  # [bs, block] last token + proposals
    target_ids: Tensor  # [bs, block] the target's token after each row
    prefix_lens: Tensor  # [bs]
    requests: Tensor  # [bs] rows of req_to_token
    step: Tensor  # [1] int64: the outcome's place
    max_commit: Tensor  # [rows] int32: tokens that a step may commit of each row's request, at least 1
    ragged: Ragged | None = None


class Paths(NamedTuple):
    """Verified trees, and where `accept` writes the accepted path of each. A path has at most `block` nodes.

    Moving KV from `sources` to `targets` brings each path to the front of its request's slots; what stays in its
    place has equal entries, and no target is the source or target of another request.
    """

    tree: Tree  # of N nodes each; depths are below `block`
    slots: Tensor  # [bs, N] int64, the KV slot of each node
    nodes: Tensor  # [bs, block] int64, written: the node of each committed token's row, then 0
    sources: Tensor  # [bs * block] int64, written
    targets: Tensor  # [bs * block] int64, written


def accept(blocks: Verification, outcomes: Outcomes, relay: Relay, paths: Paths | None = None) -> None:
    """Commit the longest prefix of proposals that the target would have produced, and one token more.

    The first disagreement ends the prefix and the target's own token there is the bonus token. With `target_ids`
    drawn from the target's distribution this is exact rejection sampling of a point-mass proposal: a proposal x
    is taken with probability p(x), and otherwise the emitted token is distributed as p without x. Either way
    every token of the run is the target's, and a run that `max_commit` cuts short is a run of the target's too.

    With `paths`, rows are the N nodes of trees: `tokens` and `target_ids` are [bs, N], and the outcomes have the
    block of the paths. A node agrees where its token is the target's after its parent, and is accepted where all
    its ancestors agree as well. Siblings have different tokens, so accepted nodes form one path, which commits
    like a block.
    """
    launch = accept_triton if blocks.tokens.is_cuda else accept_torch
    launch(blocks, outcomes, relay, paths)


def accept_torch(blocks: Verification, outcomes: Outcomes, relay: Relay, paths: Paths | None = None) -> None:
    """The definition of `accept` in torch operations."""
    tokens, target_ids, prefix_lens, requests, step, max_commit, ragged = blocks
    at_most = max_commit[requests.long()].long() - 1
    if ragged is not None:
        width = ragged.block if paths is None else paths.slots.shape[1]
        tokens, target_ids = (ragged.dense(rows, width) for rows in (tokens, target_ids))
        at_most = at_most.minimum(ragged.lens.long() - 1).clamp(min=0)
    if paths is not None:
        # Along its path a tree is a chain.
        nodes, last = _walk(tokens, target_ids, paths, ragged)
        tokens, target_ids = tokens.gather(1, nodes), target_ids.gather(1, nodes)
        at_most = at_most.minimum(last)
    bs, block = tokens.shape
    accepted = (tokens[:, 1:] == target_ids[:, :-1]).long().cumprod(dim=1).sum(dim=1).minimum(at_most)
    committed = target_ids.long()
    bonus_tokens = committed.gather(1, accepted[:, None]).squeeze(1)
    new_seq_lens = prefix_lens.long() + accepted + 1
    outcomes.token_ids[:, : bs * block].index_copy_(0, step, committed.view(1, -1))
    outcomes.commit_lens[:, :bs].index_copy_(0, step, (accepted + 1).int()[None])
    outcomes.bonus_tokens[:, :bs].index_copy_(0, step, bonus_tokens[None])
    outcomes.new_seq_lens[:, :bs].index_copy_(0, step, new_seq_lens[None])
    relay.new_seq_lens.index_copy_(0, requests.long(), new_seq_lens)
    relay.bonus_tokens.index_copy_(0, requests.long(), bonus_tokens)
    if paths is not None:
        depth = torch.arange(block, device=tokens.device)
        kept = depth <= accepted[:, None]
        paths.nodes[:] = torch.where(kept, nodes, 0)
        # Past the last slot the root's stands, which never moves.
        own = torch.where(depth < paths.slots.shape[1], depth, 0).expand(bs, block)
        paths.targets.view(bs, block)[:] = paths.slots.gather(1, own)
        paths.sources.view(bs, block)[:] = paths.slots.gather(1, torch.where(kept, nodes, own))


def _walk(tokens: Tensor, target_ids: Tensor, paths: Paths, ragged: Ragged | None) -> tuple[Tensor, Tensor]:
    """tokens, target_ids [bs, N] -> the node at each depth of the path [bs, block] int64, 0 past its end; and the
    depth of its last node [bs] int64."""
    parents, depths, ancestors, _ = paths.tree
    node = torch.arange(tokens.shape[1], device=tokens.device)
    verified = node < (tokens.shape[1] if ragged is None else ragged.lens[:, None])
    agrees = (node == 0) | ((parents >= 0) & (tokens == target_ids.gather(1, parents.clamp(min=0).long())))
    agreeing = (agrees.long() << node).sum(dim=1, keepdim=True)
    on_path = (ancestors & ~agreeing) == 0
    depths = torch.where(on_path & verified, depths, -1)
    at_depth = depths[:, None] == torch.arange(paths.nodes.shape[1], device=tokens.device)[:, None]
    return torch.where(at_depth, node, 0).amax(dim=2), depths.amax(dim=1).long().clamp(min=0)


def accept_triton(blocks: Verification, outcomes: Outcomes, relay: Relay, paths: Paths | None = None) -> None:
    """`accept` as one Triton launch, one program per request."""
    ragged = blocks.ragged
    bs, block = len(blocks.requests), blocks.tokens.shape[1] if ragged is None else ragged.block
    nodes = block
    if paths is not None:
        block, nodes = paths.nodes.shape[1], paths.slots.shape[1]
    of_trees = (blocks.requests,) * 7 if paths is None else (*paths.tree[:3], *paths[1:])
    _accept_kernel[(bs,)](
        *blocks[:-1],
        blocks.requests if ragged is None else ragged.starts,
        blocks.requests if ragged is None else ragged.lens,
        *of_trees,
        *outcomes,
        *relay,
        outcomes.token_ids.stride(0),
        outcomes.commit_lens.stride(0),
        outcomes.new_seq_lens.stride(0),
        BLOCK=block,
        LANES=triton.next_power_of_2(block),
        NODES=nodes,
        NODE_LANES=triton.next_power_of_2(nodes),
        TREE=paths is not None,
        RAGGED=ragged is not None,
    )


@triton.jit
def _path(
    tokens_ptr, target_ptr, parents_ptr, depths_ptr, ancestors_ptr, request, start, rows,
    NODES: tl.constexpr, NODE_LANES: tl.constexpr,
):  # fmt: skip
    """Of one tree: int32 [NODE_LANES], the depth of each node of the path, -1 of others."""
    node = tl.arange(0, NODE_LANES)
    at = request * NODES + node
    verified = (node < rows) & (node < NODES)
    depths = tl.load(depths_ptr + at, mask=verified, other=0)
    ancestors = tl.load(ancestors_ptr + at, mask=verified, other=0)
    parents = tl.load(parents_ptr + at, mask=verified, other=-1)
    tokens = tl.load(tokens_ptr + start + node, mask=verified, other=0).to(tl.int64)
    answers = tl.load(target_ptr + start + parents, mask=parents >= 0, other=0).to(tl.int64)
    agrees = (node == 0) | ((parents >= 0) & (tokens == answers))
    agreeing = tl.sum(agrees.to(tl.int64) << node.to(tl.int64), axis=0)
    on_path = (ancestors & ~agreeing) == 0
    return tl.where(on_path & verified, depths, -1)


@triton.jit
def _accept_kernel(
    tokens_ptr, target_ptr, prefix_ptr, requests_ptr, step_ptr, max_commit_ptr,
    starts_ptr, lens_ptr,
    parents_ptr, depths_ptr, ancestors_ptr, slots_ptr, nodes_ptr, sources_ptr, targets_ptr,
    ids_ptr, commit_ptr, bonus_ptr, new_seq_lens_ptr,
    relay_seq_lens_ptr, relay_bonus_ptr,
    ids_stride, commit_stride, lens_stride,
    BLOCK: tl.constexpr, LANES: tl.constexpr, NODES: tl.constexpr, NODE_LANES: tl.constexpr,
    TREE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(requests_ptr + request).to(tl.int64)
    lane = tl.arange(0, LANES)
    start, rows = request * NODES, NODES
    if RAGGED:
        start = tl.load(starts_ptr + request).to(tl.int64)
        rows = tl.load(lens_ptr + request)
    # Row of each token of the chain, of the token after it, and the last of the chain.
    at, following, last = lane, lane + 1, rows - 1
    if TREE:
        depths = _path(
            tokens_ptr, target_ptr, parents_ptr, depths_ptr, ancestors_ptr, request, start, rows,
            NODES, NODE_LANES,
        )  # fmt: skip
        node = tl.arange(0, NODE_LANES)[None, :]
        at = tl.max(tl.where(depths[None, :] == lane[:, None], node, 0), axis=1)
        following = tl.max(tl.where(depths[None, :] == lane[:, None] + 1, node, 0), axis=1)
        last = tl.max(depths, axis=0)
    at_most = tl.maximum(tl.minimum(tl.load(max_commit_ptr + row) - 1, last), 0)
    proposes = lane < last
    proposal = tl.load(tokens_ptr + start + following, mask=proposes, other=0).to(tl.int64)
    committed = tl.load(target_ptr + start + at, mask=at < rows, other=0).to(tl.int64)
    prefix = tl.load(prefix_ptr + request).to(tl.int64)
    disagrees = (proposal != committed) | ~proposes
    accepted = tl.minimum(tl.min(tl.where(disagrees, lane, BLOCK - 1), axis=0), at_most)
    bonus = tl.sum(tl.where(lane == accepted, committed, 0), axis=0)
    new_seq_len = prefix + accepted + 1

    place = tl.load(step_ptr)
    out = place * lens_stride + request
    tl.store(ids_ptr + place * ids_stride + request * BLOCK + lane, committed, mask=lane < BLOCK)
    tl.store(commit_ptr + place * commit_stride + request, accepted + 1)
    tl.store(bonus_ptr + out, bonus)
    tl.store(new_seq_lens_ptr + out, new_seq_len)
    tl.store(relay_seq_lens_ptr + row, new_seq_len)
    tl.store(relay_bonus_ptr + row, bonus)
    if TREE:
        kept = lane <= accepted
        # Past the last slot the root's stands, which never moves.
        own = tl.where(lane < NODES, lane, 0)
        slots = slots_ptr + request * NODES
        out = request * BLOCK + lane
        tl.store(nodes_ptr + out, tl.where(kept, at, 0), mask=lane < BLOCK)
        tl.store(targets_ptr + out, tl.load(slots + own), mask=lane < BLOCK)
        tl.store(sources_ptr + out, tl.load(slots + tl.where(kept, at, own)), mask=lane < BLOCK)
