"""What `return_sampling_mask` asks for: the tokens that each committed one was drawn among, with probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dflash_sglang.sglang_names.scheduler import SamplingMaskOutput, SamplingMaskStatus, get_exec
from dflash_sglang.verify.filters import Filters, filtered_probs

if TYPE_CHECKING:
    from dflash_sglang.sglang_names.scheduler import SamplingBatchInfo

AT_ONCE = 8  # requests, of whose rows a handful of copies is made
HEADROOM, LEAST = 4, 256  # times the largest top_k, and at least: tokens that tie with the last one are kept
ROUNDING = 0.01  # of a probability, by which a cut may be found elsewhere than where the token was drawn


def sampling_mask_output(
    logits: Tensor,  # [bs * block, vocab], adjusted
    info: SamplingBatchInfo,
    target_ids: Tensor,  # [bs, block], committed up to
    commit_lens: Tensor,  # [bs]
    kernels: bool,
) -> SamplingMaskOutput | None:
    """Of the requests of a batch that ask for it, one support for each row of their blocks; None if none asks.

    A greedy request's is its token. SGLang aborts a request with a status other than OK in a committed row:
    OVERFLOW of more tokens than this has room for or than --sampling-mask-max-tokens, INVALID of a token outside.
    `kernels`: as in `Filters.from_batch`.
    """
    asking = info.sampling_mask_batch_indices
    if asking is None:
        return None
    block = target_ids.shape[1]
    tokens, lens = target_ids[asking], commit_lens[asking].clone()
    room = max(HEADROOM * max(info.sampling_mask_top_ks), LEAST)
    most = min(room, get_exec().features.sampling_mask_max_tokens)
    if info.is_all_greedy:
        probs = torch.ones_like(tokens, dtype=torch.float32)[:, :, None]
        supports = _Supports(tokens[:, :, None], probs, probs[:, :, 0], torch.ones_like(tokens))
    else:
        blocks, filters = logits.view(-1, block, logits.shape[1]), Filters.from_batch(info, kernels)
        parts = [
            _supports(blocks[some], filters.part(some), tokens_of_some, most)
            for some, tokens_of_some in zip(asking.split(AT_ONCE), tokens.split(AT_ONCE), strict=True)
        ]
        supports = _Supports(*(torch.cat(fields) for fields in zip(*parts, strict=True)))
    ids, probs, own, number = supports
    support = info.sampling_support_logprobs_capture_indices
    statuses = torch.where(number > most, SamplingMaskStatus.OVERFLOW, SamplingMaskStatus.OK)
    return SamplingMaskOutput(
        token_ids=ids.int(),
        lengths=number.clamp(max=ids.shape[-1]).int(),
        selected_logprobs=own.log(),
        support_logprobs=None if support is None else probs[support].log(),
        statuses=torch.where(own > 0, statuses, SamplingMaskStatus.INVALID).to(torch.int8),
        num_accept_tokens=lens,
    )


class _Supports(NamedTuple):
    """Of n requests' blocks: tokens and probabilities [n, block, k], the likeliest first; the probability of the
    committed token, and how many tokens there are [n, block]."""

    ids: Tensor
    probs: Tensor
    own: Tensor
    number: Tensor


def _supports(blocks: Tensor, filters: Filters, tokens: Tensor, most: int) -> _Supports:
    """blocks [n, block, vocab]; filters of n requests; tokens [n, block], committed up to."""
    rows, filters = blocks.flatten(0, 1).float(), filters.repeat(blocks.shape[1])
    column = tokens.view(-1, 1)
    whole = _with_token(filtered_probs(rows, filters), rows / filters.temperatures[:, None], column)
    greedy = (filters.top_ks <= 1)[:, None]
    whole = torch.where(greedy, torch.zeros_like(whole).scatter_(1, column, 1.0), whole).view_as(blocks)
    probs, ids = whole.topk(min(most, whole.shape[-1]), dim=-1)
    return _Supports(ids, probs, whole.gather(2, tokens[:, :, None])[:, :, 0], (whole > 0).sum(dim=-1))


def _with_token(probs: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
    """[R, vocab] with the token [R, 1] of each row, if it lies at the cut: it was drawn where the cut was rounded
    otherwise. logits [R, vocab]: over their temperatures."""
    least, at = probs.masked_fill(probs == 0, float("inf")).min(dim=-1, keepdim=True)
    below = logits.gather(1, tokens) - logits.gather(1, at)
    own = probs.gather(1, tokens)
    own = torch.where((own == 0) & (below >= -ROUNDING), least * below.exp(), own)
    return probs.scatter(1, tokens, own)
