"""Rejection sampling of proposals: every output token is distributed as the target samples it.

A row accepts proposal x with probability c(x) / q(x), where q is what the draft proposed from and c <= min(p, q)
a lower bound from the row's likely tokens; the first row that does not draws its token from p - c. With c =
min(p, q) that is the usual scheme; a smaller c accepts less often and changes nothing in the outcome, so that
only one row per request needs its whole distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_sglang.compat import SamplingBatchInfo
from dflash_sglang.drafting.proposals import Proposals, draw
from dflash_sglang.kernels.row_stats import row_stats
from dflash_sglang.verify.acceptance import Accepted
from dflash_sglang.verify.filters import Filters, filtered_probs, kept

NOT_COMMITTED = -1


def rejection_sample(
    logits: Tensor,  # [bs * block, vocab] float32, adjusted
    info: SamplingBatchInfo,
    proposals: Proposals,
    kernels: bool,  # as Filters.of
) -> Tensor:
    """[bs, block] int64: the committed tokens of each request, the rest NOT_COMMITTED.

    Greedy requests in the batch commit what agrees with the argmax, as if they were alone.
    """
    bs, block_size = proposals.tokens.shape
    filters = Filters.of(info, kernels)
    of_rows = filters.repeat(block_size)
    stats = row_stats(logits, of_rows.temperatures)
    best = stats.argmax.view(bs, block_size)
    common = _common_mass(logits, of_rows, stats.log_normaliser, proposals)
    greedy = filters.top_ks <= 1
    agrees = (proposals.candidates == best[:, :-1, None]).float()
    common = torch.where(greedy[:, None, None], torch.minimum(agrees, proposals.probs), common)

    proposed = proposals.tokens[:, 1:]
    is_proposed = proposals.candidates == proposed[:, :, None]
    chance = (common * is_proposed).sum(dim=-1) / (proposals.probs * is_proposed).sum(dim=-1)
    accepts = torch.rand_like(chance) < chance
    num_accepted = accepts.long().cumprod(dim=1).sum(dim=1)

    # The one row of each request that draws its own token.
    request = torch.arange(bs, device=logits.device)
    weights = filtered_probs(logits.view(bs, block_size, -1)[request, num_accepted], filters)
    rejecting = num_accepted.clamp(max=block_size - 2)
    taken = common[request, rejecting] * (num_accepted < block_size - 1)[:, None]
    left = weights.scatter_add(1, proposals.candidates[request, rejecting], -taken).clamp_(min=0)
    left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, weights)  # nothing left but rounding
    drawn = draw(left)
    drawn = torch.where(greedy, best.gather(1, num_accepted[:, None]).squeeze(1), drawn)

    offsets = torch.arange(block_size, device=logits.device)
    committed = torch.cat([proposed, drawn[:, None]], dim=1)
    committed = torch.where(offsets == num_accepted[:, None], drawn[:, None], committed)
    return committed.masked_fill(offsets > num_accepted[:, None], NOT_COMMITTED)


def _common_mass(logits: Tensor, filters: Filters, log_normaliser: Tensor, proposals: Proposals) -> Tensor:
    """[bs, block - 1, K]: at most min(p, q) of every candidate, p the target's filtered probability."""
    bs, block_size = proposals.tokens.shape

    def by_proposal(of_rows: Tensor) -> Tensor:
        return of_rows.view(bs, block_size)[:, :-1, None]

    logit = logits.view(bs, block_size, -1)[:, :-1].gather(2, proposals.candidates)
    logprob = logit / by_proposal(filters.temperatures) - by_proposal(log_normaliser)
    bounds = kept(logits, filters, log_normaliser)
    p = logprob.exp() / by_proposal(bounds.mass)
    p = torch.where(logprob >= by_proposal(bounds.floor), p, 0.0)
    return torch.minimum(p, proposals.probs)


def committed(token_ids: Tensor, prefix_lens: Tensor) -> Accepted:
    """The accept that `rejection_sample`'s tokens [bs, block] stand for."""
    commit_lens = (token_ids != NOT_COMMITTED).sum(dim=1)
    bonus_tokens = token_ids.gather(1, commit_lens[:, None] - 1).squeeze(1)
    return Accepted(token_ids.clamp(min=0), commit_lens.int(), bonus_tokens, prefix_lens.long() + commit_lens)
