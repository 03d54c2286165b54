"""Rejection sampling of proposals: every output token is distributed as the target samples it.

A row accepts proposal x with probability min(p(x), q(x)) / q(x), where q is what the draft proposed from and p the
target's filtered distribution; the first row that does not draws its token from p - min(p, q).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.kernels.sampled.tokens import CHUNK, SampledRows, Workspace, target_tokens_triton
from dflash_sglang.verify.sampling import Filters, filtered_probs

if TYPE_CHECKING:
    from dflash_sglang.sglang_names.scheduler import SamplingBatchInfo

NOT_COMMITTED = -1
AT_ONCE = 256  # requests that one sequence of launches takes: they share its buffers


class RejectionSampler:
    """Samples the verified rows of up to `max_requests` requests, on a GPU by kernels whose state is here."""

    def __init__(self, max_requests: int, block_size: int, vocab_size: int, device: str):
        on_gpu = torch.device(device).type == "cuda"
        at_once = min(max_requests, AT_ONCE)
        self._work = Workspace(at_once, block_size, vocab_size, device) if on_gpu else None

    def warm_up(self, proposals: Proposals, logits: Tensor) -> None:
        """Compile every form of the launches, for proposals like these [1, block] and logits like these
        [block, vocab], whose dtype and strides count."""
        if self._work is None:
            return
        device = proposals.tokens.device
        ones = torch.ones(1, device=device)
        top_k = torch.full((1,), 2, dtype=torch.int32, device=device)
        out = torch.empty_like(proposals.tokens)
        for filtered, renormalised in ((False, False), (True, False), (True, True)):
            filters = Filters(ones, top_k, ones / 2, ones / 4, filtered, filtered, filtered, renormalised)
            target_tokens_triton(_sampled(logits, proposals), filters, self._work, out)

    def forget_steps(self) -> None:
        """The kernels count steps for their random numbers: from none on again."""
        if self._work is not None:
            self._work.forget_steps()

    def target_tokens(
        self,
        logits: Tensor,  # [rows, vocab], adjusted: of bs * block rows, or of the ragged ones
        info: SamplingBatchInfo,
        proposals: Proposals,
        kernels: bool,  # as Filters.from_batch
        ragged: Ragged | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """[rows] int64, into `out` where given: the accepted proposals of each request, the token of the target's
        after them, which is another than was proposed there, then zeros. Greedy requests in the batch get the
        argmax, as if they were alone. Capturable in a CUDA graph.
        """
        bs, block_size = proposals.tokens.shape
        if self._work is None:
            tokens = rejection_sample(logits, info, proposals, kernels, ragged).clamp_(min=0)
            if ragged is not None:
                tokens = tokens[torch.arange(block_size, device=tokens.device) < ragged.lens[:, None]]
            tokens = tokens.flatten()
            return tokens if out is None else out.copy_(tokens)
        if out is None:
            out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        filters = Filters.from_batch(info, kernels)
        rows = _sampled(logits, proposals, ragged)
        if bs <= AT_ONCE:
            target_tokens_triton(rows, filters, self._work, out)
            return out
        for start in range(0, bs, AT_ONCE):
            part = slice(start, start + AT_ONCE)
            of_part = slice(start * block_size, part.stop * block_size) if ragged is None else slice(None)
            target_tokens_triton(rows.part(part, of_part), filters.part(part), self._work, out[of_part])
        return out


def _sampled(logits: Tensor, proposals: Proposals, ragged: Ragged | None = None) -> SampledRows:
    return SampledRows(logits, proposals.tokens, proposals.candidates, proposals.probs, ragged)


def rejection_sample(
    logits: Tensor, info: SamplingBatchInfo, proposals: Proposals, kernels: bool, ragged: Ragged | None = None
) -> Tensor:
    """[bs, block] int64: the committed tokens of each request, the rest NOT_COMMITTED. The definition."""
    bs, block_size = proposals.tokens.shape
    uniforms = torch.rand((bs, block_size + 1), device=logits.device)
    return sample_with(logits, Filters.from_batch(info, kernels), proposals, uniforms, ragged=ragged)


def sample_with(
    logits: Tensor,  # [rows, vocab], adjusted: of bs * block rows, or of the ragged ones
    filters: Filters,  # of bs requests
    proposals: Proposals,
    uniforms: Tensor,  # [bs, block + 1] in [0, 1): a coin for every proposal, two for the draw
    chunk: int = CHUNK,  # the draw takes a chunk of the vocabulary first, then a token of it
    ragged: Ragged | None = None,
) -> Tensor:
    """[bs, block] int64: the committed tokens of each request, the rest NOT_COMMITTED, as `uniforms` decide."""
    bs, block_size = proposals.tokens.shape
    last = torch.full((bs,), block_size - 1, device=logits.device)  # row of each request
    if ragged is not None:
        last = ragged.lens.long() - 1
        logits = ragged.dense(logits, block_size).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    p = filtered_probs(logits, filters.repeat(block_size)).view(bs, block_size, -1)
    best = logits.argmax(dim=-1).view(bs, block_size)
    greedy = filters.top_ks <= 1
    common = torch.minimum(p[:, :-1].gather(2, proposals.candidates), proposals.probs)
    proposed = proposals.tokens[:, 1:]
    is_proposed = proposals.candidates == proposed[:, :, None]
    q = (proposals.probs * is_proposed).sum(dim=-1).clamp(min=torch.finfo(torch.float32).tiny, max=1)
    agrees = proposed == best[:, :-1]
    chance = (common * is_proposed).sum(dim=-1) / q
    accepts = torch.where(greedy[:, None], agrees, uniforms[:, : block_size - 1] < chance)
    num_accepted = accepts.long().cumprod(dim=1).sum(dim=1).minimum(last)

    # The one row of each request that draws its own token.
    request = torch.arange(bs, device=logits.device)
    rejecting = num_accepted.clamp(max=block_size - 2)
    rejects = (num_accepted < last)[:, None]
    own = proposed[request, rejecting][:, None]
    weights = p[request, num_accepted]
    kept = torch.where(rejects, weights.scatter(1, own, 0.0), weights)
    taken = common[request, rejecting] * rejects
    left = kept.scatter_add(1, proposals.candidates[request, rejecting], -taken).clamp_(min=0)
    left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, kept)  # nothing left but rounding
    drawn = _draw_by_chunks(left, uniforms[:, block_size - 1 :], chunk)
    drawn = torch.where(greedy, best.gather(1, num_accepted[:, None]).squeeze(1), drawn)

    offsets = torch.arange(block_size, device=logits.device)
    committed = torch.cat([proposed, drawn[:, None]], dim=1)
    committed = torch.where(offsets == num_accepted[:, None], drawn[:, None], committed)
    return committed.masked_fill(offsets > num_accepted[:, None], NOT_COMMITTED)


def _draw_by_chunks(weights: Tensor, uniforms: Tensor, chunk: int) -> Tensor:
    """weights [bs, n], uniforms [bs, 2] -> [bs] indices: a chunk in proportion to its mass, then a token of it."""
    n = weights.shape[1]
    chunk = min(chunk, n)
    by_chunk = torch.nn.functional.pad(weights, (0, -n % chunk)).unflatten(1, (-1, chunk))
    taken = _pick(by_chunk.sum(dim=-1), uniforms[:, 0])
    within = _pick(by_chunk[torch.arange(len(taken), device=taken.device), taken], uniforms[:, 1])
    return (taken * chunk + within).clamp_(max=n - 1)  # where no weight is a number, the last of all


def _pick(weights: Tensor, coins: Tensor) -> Tensor:
    """weights [bs, n], coins [bs] -> [bs] the first index at which the sum passes the coin's share."""
    hit = (weights.cumsum(dim=-1) > (coins * weights.sum(dim=-1))[:, None]) & (weights > 0)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).long().argmax(dim=-1)
    return torch.where(hit.any(dim=-1), hit.long().argmax(dim=-1), last)
