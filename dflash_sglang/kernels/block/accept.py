"""Accept in one launch: what each verified block commits, where the next step and the host read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_sglang.kernels.block.grow_tree import Tree
from dflash_sglang.kernels.head.pack_shard import Candidates

COIN_BITS = 31
GOLDEN = 1_327_217_885  # 2**31 over the golden ratio: multiples of it spread evenly over the coin's range


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


class Forced(NamedTuple):
    """Accept lengths that a coin decides instead of the target."""

    # [profiles, block - 1] int64: proposal i is accepted where the coin is below; rows do not increase. A request
    # has the profile of its row of req_to_token, modulo their number.
    survival: Tensor
    alike: bool  # one coin for all requests of a step, not one each
    token_id: int | None  # what is committed, None: the accepted proposals and the target's token

    @property
    def logprobs(self) -> Tensor:
        """[profiles, block - 1] float32: that a proposal is accepted once those before it are."""
        survival = (self.survival.double() / (1 << COIN_BITS)).clamp(min=1e-9)
        before = torch.cat([torch.ones_like(survival[:, :1]), survival[:, :-1]], dim=1)
        return (survival / before).log().float()

    def cases(self, requests: Tensor, prefix_lens: Tensor) -> Tensor:
        """[bs] rows of `survival` and `logprobs` that are those of requests [bs]."""
        del prefix_lens
        return requests.long() % len(self.survival)


class Recorded(NamedTuple):
    """Accept lengths that were recorded, at every token of texts that follow one another in a circle.

    A request reads on in them as it commits. So its steps begin where those of real decoding do, whatever its
    steps verify: mostly after a token that was hard to foretell.
    """

    accepted: Tensor  # [starts] int64: proposals that come true of a whole block at each token
    offsets: Tensor  # [rows] int64, 0 to starts - 1: of each row of req_to_token, the place less committed tokens
    token_id: int | None  # as `Forced` has it
    candidates: Tensor  # [starts, block - 1, K] float32: logprobs of the likeliest tokens of each position
    ranks: Tensor  # [starts, block - 1] int64: which of them comes true, K where none does

    @property
    def logprobs(self) -> Tensor:
        """[starts, block - 1] float32: of the proposals there, as the draft has them."""
        return self.candidates[:, :, 0].contiguous()

    def cases(self, requests: Tensor, prefix_lens: Tensor) -> Tensor:
        """[bs] rows of `accepted` and `logprobs` for the next step of requests [bs]."""
        return (self.offsets[requests.long()] + prefix_lens.long()) % len(self.accepted)

    def likeliest(self, requests: Tensor, prefix_lens: Tensor) -> Candidates:
        """For the next trees of requests [bs]. The tokens stand for their positions and ranks."""
        logprobs = self.candidates[self.cases(requests, prefix_lens)]
        ids = torch.arange(logprobs[0].numel(), device=logprobs.device)
        return Candidates(ids.expand(len(logprobs), -1).contiguous().view(logprobs.shape), logprobs)

    def answers(self, requests: Tensor, prefix_lens: Tensor, depths: Tensor) -> Tensor:
        """[bs, N] after nodes at these depths [bs, N]: the tokens of `likeliest` that come true, or one that is
        nobody's child."""
        steps, count = self.candidates.shape[1:]
        ranks = self.ranks[self.cases(requests, prefix_lens)]
        place = depths.long().clamp(max=steps - 1)
        return place * count + ranks.gather(1, place)

    def restart(self, requests: Tensor, before: Tensor, seq_lens: Tensor) -> None:
        """Rows of req_to_token get new requests of seq_lens [bs] tokens. They read on where the requests before
        them stopped, at `before` [bs] tokens."""
        self.offsets[requests] = (self.offsets[requests] + before - seq_lens) % len(self.accepted)


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
    step: Tensor  # [2] int64: the outcome's place, and a coin below 2**COIN_BITS
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


def accept(
    blocks: Verification,
    outcomes: Outcomes,
    relay: Relay,
    forced: Forced | Recorded | None = None,
    paths: Paths | None = None,
) -> None:
    """Commit the longest prefix of proposals that the target would have produced, and one token more.

    The first disagreement ends the prefix and the target's own token there is the bonus token. With `target_ids`
    drawn from the target's distribution this is exact rejection sampling of a point-mass proposal: a proposal x
    is taken with probability p(x), and otherwise the emitted token is distributed as p without x. Either way
    every token of the run is the target's, and a run that `max_commit` cuts short is a run of the target's too.

    With `paths`, rows are the N nodes of trees: `tokens` and `target_ids` are [bs, N], and the outcomes have the
    block of the paths. A node agrees where its token is the target's after its parent, and is accepted where all
    its ancestors agree as well. Siblings have different tokens, so accepted nodes form one path, which commits
    like a block. A forced length is that of the path to the first of the deepest nodes, as far as that goes.
    """
    launch = accept_triton if blocks.tokens.is_cuda else accept_torch
    launch(blocks, outcomes, relay, forced, paths)


def accept_torch(
    blocks: Verification,
    outcomes: Outcomes,
    relay: Relay,
    forced: Forced | Recorded | None = None,
    paths: Paths | None = None,
) -> None:
    """The definition of `accept` in torch operations."""
    tokens, target_ids, prefix_lens, requests, step, max_commit, ragged = blocks
    at_most = max_commit[requests.long()].long() - 1
    if ragged is not None:
        width = ragged.block if paths is None else paths.slots.shape[1]
        tokens, target_ids = (ragged.dense(rows, width) for rows in (tokens, target_ids))
        at_most = at_most.minimum(ragged.lens.long() - 1).clamp(min=0)
    if paths is not None:
        # Along its path a tree is a chain.
        nodes, last = _walk(tokens, target_ids, paths, forced, ragged)
        tokens, target_ids = tokens.gather(1, nodes), target_ids.gather(1, nodes)
        at_most = at_most.minimum(last)
    bs, block = tokens.shape
    if forced is None:
        accepted = (tokens[:, 1:] == target_ids[:, :-1]).long().cumprod(dim=1).sum(dim=1).minimum(at_most)
        committed = target_ids.long()
    else:
        cases = forced.cases(requests, prefix_lens)
        if isinstance(forced, Recorded):
            accepted = forced.accepted[cases].clamp(max=block - 1)
        else:
            request = torch.arange(bs, device=tokens.device)
            coins = (step[1] + request * (0 if forced.alike else GOLDEN)) % (1 << COIN_BITS)
            accepted = (coins[:, None] < forced.survival[cases, : block - 1]).sum(dim=1)
        accepted = accepted.minimum(at_most)
        proposed = torch.arange(block, device=tokens.device) < accepted[:, None]
        committed = torch.where(proposed, tokens.roll(-1, dims=1), target_ids).long()
        if forced.token_id is not None:
            committed = torch.full_like(committed, forced.token_id)
    bonus_tokens = committed.gather(1, accepted[:, None]).squeeze(1)
    new_seq_lens = prefix_lens.long() + accepted + 1
    place = step[:1]
    outcomes.token_ids[:, : bs * block].index_copy_(0, place, committed.view(1, -1))
    outcomes.commit_lens[:, :bs].index_copy_(0, place, (accepted + 1).int()[None])
    outcomes.bonus_tokens[:, :bs].index_copy_(0, place, bonus_tokens[None])
    outcomes.new_seq_lens[:, :bs].index_copy_(0, place, new_seq_lens[None])
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


def _walk(
    tokens: Tensor, target_ids: Tensor, paths: Paths, forced: Forced | Recorded | None, ragged: Ragged | None
) -> tuple[Tensor, Tensor]:
    """tokens, target_ids [bs, N] -> the node at each depth of the path [bs, block] int64, 0 past its end; and the
    depth of its last node [bs] int64."""
    parents, depths, ancestors, _ = paths.tree
    node = torch.arange(tokens.shape[1], device=tokens.device)
    verified = node < (tokens.shape[1] if ragged is None else ragged.lens[:, None])
    if forced is None:
        agrees = (node == 0) | ((parents >= 0) & (tokens == target_ids.gather(1, parents.clamp(min=0).long())))
        agreeing = (agrees.long() << node).sum(dim=1, keepdim=True)
        on_path = (ancestors & ~agreeing) == 0
    else:
        leaf = torch.where(verified, depths, 0).argmax(dim=1, keepdim=True)
        on_path = (ancestors.gather(1, leaf) >> node) & 1 == 1
    depths = torch.where(on_path & verified, depths, -1)
    at_depth = depths[:, None] == torch.arange(paths.nodes.shape[1], device=tokens.device)[:, None]
    return torch.where(at_depth, node, 0).amax(dim=2), depths.amax(dim=1).long().clamp(min=0)


def accept_triton(
    blocks: Verification,
    outcomes: Outcomes,
    relay: Relay,
    forced: Forced | Recorded | None = None,
    paths: Paths | None = None,
) -> None:
    """`accept` as one Triton launch, one program per request."""
    ragged = blocks.ragged
    survival = forced.survival if isinstance(forced, Forced) else None
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
        forced.accepted if isinstance(forced, Recorded) else blocks.step if survival is None else survival,
        forced.offsets if isinstance(forced, Recorded) else blocks.step,
        outcomes.token_ids.stride(0),
        outcomes.commit_lens.stride(0),
        outcomes.new_seq_lens.stride(0),
        BLOCK=block,
        LANES=triton.next_power_of_2(block),
        NODES=nodes,
        NODE_LANES=triton.next_power_of_2(nodes),
        TREE=paths is not None,
        RAGGED=ragged is not None,
        FORCED=forced is not None,
        STARTS=len(forced.accepted) if isinstance(forced, Recorded) else 0,
        SPREAD=GOLDEN if isinstance(forced, Forced) and not forced.alike else 0,
        PROFILES=1 if survival is None else len(survival),
        PROPOSALS=0 if survival is None else survival.shape[1],
        TOKEN_ID=-1 if forced is None or forced.token_id is None else forced.token_id,
        COINS=1 << COIN_BITS,
    )


@triton.jit
def _path(
    tokens_ptr, target_ptr, parents_ptr, depths_ptr, ancestors_ptr, request, start, rows,
    NODES: tl.constexpr, NODE_LANES: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """Of one tree: int32 [NODE_LANES], the depth of each node of the path, -1 of others."""
    node = tl.arange(0, NODE_LANES)
    at = request * NODES + node
    verified = (node < rows) & (node < NODES)
    depths = tl.load(depths_ptr + at, mask=verified, other=0)
    ancestors = tl.load(ancestors_ptr + at, mask=verified, other=0)
    if FORCED:
        leaf = tl.min(tl.where(depths == tl.max(depths, axis=0), node, NODE_LANES), axis=0)
        above = tl.sum(tl.where(node == leaf, ancestors, 0), axis=0)
        on_path = ((above >> node.to(tl.int64)) & 1) == 1
    else:
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
    forced_ptr, offsets_ptr,
    ids_stride, commit_stride, lens_stride,
    BLOCK: tl.constexpr, LANES: tl.constexpr, NODES: tl.constexpr, NODE_LANES: tl.constexpr,
    TREE: tl.constexpr, RAGGED: tl.constexpr,
    FORCED: tl.constexpr, STARTS: tl.constexpr, SPREAD: tl.constexpr, PROFILES: tl.constexpr,
    PROPOSALS: tl.constexpr, TOKEN_ID: tl.constexpr, COINS: tl.constexpr,
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
            NODES, NODE_LANES, FORCED,
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
    if FORCED:
        if STARTS:
            case = (tl.load(offsets_ptr + row) + prefix) % STARTS
            survives = lane < tl.load(forced_ptr + case)
        else:
            coin = (tl.load(step_ptr + 1) + request * SPREAD) % COINS
            survives = coin < tl.load(forced_ptr + row % PROFILES * PROPOSALS + lane, mask=proposes, other=0)
        accepted = tl.minimum(tl.sum((survives & proposes).to(tl.int32), axis=0), at_most)
        committed = tl.where(lane < accepted, proposal, committed)
        if TOKEN_ID >= 0:
            committed = tl.full((LANES,), TOKEN_ID, tl.int64)
    else:
        disagrees = (proposal != committed) | (lane >= last)
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
