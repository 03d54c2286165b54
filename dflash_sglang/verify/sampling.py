"""How plain decoding samples a row, for every row of a block: filters, seeded tokens, and the reported masks.

Each row of a block is a decode step of its request: SGLang's own sampler runs over the logits of all rows, every
per-request parameter repeated for the rows of its request.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_sglang.kernels.sampled.tokens import RowFilters
from dflash_sglang.sglang_names.scheduler import (
    LogitsProcessorOutput,
    Sampler,
    SamplingBatchInfo,
    SamplingMaskOutput,
    SamplingMaskStatus,
    get_exec,
)

# Of `sampling_mask_output`.
AT_ONCE = 8  # requests, of whose rows a handful of copies is made
HEADROOM, LEAST = 4, 256  # times the largest top_k, and at least: tokens that tie with the last one are kept
ROUNDING = 0.01  # of a probability, by which a cut may be found elsewhere than where the token was drawn


class Filters(RowFilters):
    """The sampling filters of R rows."""

    __slots__ = ()

    @classmethod
    def from_batch(cls, info: SamplingBatchInfo, kernels: bool) -> Filters:
        """Of a batch, one row per request. `kernels`: SGLang samples with its kernels, not with torch."""
        return cls(
            info.temperatures.view(-1),
            info.top_ks,
            info.top_ps,
            info.min_ps,
            info.need_top_k_sampling,
            info.need_top_p_sampling,
            info.need_min_p_sampling,
            renormalised=kernels and info.need_min_p_sampling,
        )

    def repeat(self, times: int) -> Filters:
        """Every row `times` times, for the rows of its block."""
        return self._replace(**{name: getattr(self, name).repeat_interleave(times) for name in self._fields[:4]})

    def part(self, rows: slice | Tensor) -> Filters:
        return self._replace(**{name: getattr(self, name)[rows] for name in self._fields[:4]})


def filtered_probs(logits: Tensor, filters: Filters) -> Tensor:
    """logits [R, vocab] -> the probabilities [R, vocab] that plain decoding samples from; rows sum to 1."""
    probs = (logits / filters.temperatures[:, None]).softmax(dim=-1)
    if not filters.any:
        return probs
    ordered = probs.sort(dim=-1, descending=True).values
    by_k = torch.arange(probs.shape[1], device=probs.device) < filters.top_ks[:, None]
    whole = _with_ties(ordered, by_k)[:, None] if filters.renormalised else 1.0
    top_ps = filters.top_ps[:, None]
    by_p = (ordered.cumsum(dim=-1) - ordered <= top_ps * whole) | (top_ps >= 1)
    by_m = ordered >= filters.min_ps[:, None] * ordered[:, :1]
    floor = ordered.masked_fill(~(by_k & by_p & by_m), float("inf")).amin(dim=-1, keepdim=True)
    kept = probs.masked_fill(probs < floor, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _with_ties(probs: Tensor, inside: Tensor) -> Tensor:
    """The mass of a prefix of descending probs, and of the tokens after it that equal its last one."""
    least = probs.masked_fill(~inside, float("inf")).amin(dim=-1, keepdim=True)
    return (probs * (probs >= least)).sum(dim=-1)


def seeded_tokens(
    logits: Tensor,  # [rows, vocab] adjusted; consumed
    info: SamplingBatchInfo,
    positions: Tensor,  # [rows] position of the row's input token, as seeds count them
    sampler: Sampler,
    requests: Tensor,  # [rows] int64, the request of each row
) -> Tensor:
    """[rows] int64: SGLang's sampler over all rows. A row's token follows from its seed, its position and its
    logits alone, so that it is the token of plain decoding whatever was proposed and however much is verified."""
    chosen = sampler(
        LogitsProcessorOutput(next_token_logits=logits),
        rows_of(info, requests),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=positions,
    )
    return chosen.long()


def rows_of(info: SamplingBatchInfo, requests: Tensor) -> SamplingBatchInfo:
    """The parameters of a batch for rows of these requests [rows]; what is in the logits already is left out."""
    return dataclasses.replace(
        info,
        temperatures=info.temperatures[requests],
        top_ps=info.top_ps[requests],
        top_ks=info.top_ks[requests],
        min_ps=info.min_ps[requests],
        sampling_seed=None if info.sampling_seed is None else info.sampling_seed[requests],
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_params=None,
        custom_logit_processor=None,
        sampling_mask_batch_indices=None,
    )


def sampling_mask_output(
    logits: Tensor,  # [bs * block, vocab], adjusted
    info: SamplingBatchInfo,
    target_ids: Tensor,  # [bs, block], committed up to
    commit_lens: Tensor,  # [bs]
    kernels: bool,
) -> SamplingMaskOutput | None:
    """What `return_sampling_mask` asks for: the tokens that each committed token was drawn among, and their
    probabilities. One support for each row of the requests that ask; None if none asks.

    A greedy request's support is its token. SGLang aborts a request with a status other than OK in a committed
    row: OVERFLOW of more tokens than this has room for or than --sampling-mask-max-tokens, INVALID of a token
    outside.
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
