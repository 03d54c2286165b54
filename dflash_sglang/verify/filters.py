"""The target's distribution at a row: temperature, top-k, top-p and min-p as SGLang's sampler filters."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_sglang.compat import SamplingBatchInfo
from dflash_sglang.kernels.row_stats import likely_logprobs

LIKELY = 1024  # tokens less likely than 1 / LIKELY are not searched for the bounds of a filtered distribution


class Filters(NamedTuple):
    """The sampling filters of R rows. Every filter keeps a prefix of the tokens sorted by probability."""

    temperatures: Tensor  # [R]
    top_ks: Tensor  # [R]
    top_ps: Tensor  # [R]
    min_ps: Tensor  # [R]
    top_k: bool  # whether any row has one, as the next two
    top_p: bool
    min_p: bool
    renormalised: bool  # top-p is of what top-k leaves (SGLang's kernels beside a min-p), else of the whole

    @classmethod
    def of(cls, info: SamplingBatchInfo, kernels: bool) -> Filters:
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

    @property
    def any(self) -> bool:
        return self.top_k or self.top_p or self.min_p

    def repeat(self, times: int) -> Filters:
        """Every row `times` times, for the rows of its block."""
        return self._replace(**{name: getattr(self, name).repeat_interleave(times) for name in self._fields[:4]})


class Kept(NamedTuple):
    """What the filters leave of R rows, from their likely tokens alone."""

    floor: Tensor  # [R] every token with at least this log-probability is kept
    mass: Tensor  # [R] upper bound on the kept probability, exact where it is made of likely tokens


def kept(logits: Tensor, filters: Filters, log_normaliser: Tensor) -> Kept:
    """Bounds of the filtered distributions of logits [R, vocab] in two passes, without a matrix of them."""
    if not filters.any:
        rows = logits.shape[0]
        return Kept(logits.new_full((rows,), float("-inf")), logits.new_ones(rows))
    logprobs = likely_logprobs(logits, filters.temperatures, log_normaliser, LIKELY)
    probs = logprobs.exp()
    before = probs.cumsum(dim=-1) - probs
    found = probs > 0
    found_mass = probs.sum(dim=-1)
    by_k = found & (torch.arange(probs.shape[1], device=logits.device) < filters.top_ks[:, None])
    # Unlikely tokens that top-k keeps as well have less than 1 / LIKELY each.
    missing = (filters.top_ks - found.sum(dim=-1)).clamp(min=0) / LIKELY
    everything = filters.top_ks >= logits.shape[1]
    k_low = _with_ties(probs, by_k).masked_fill(everything, 1.0)
    k_high = (k_low + missing).clamp(max=1.0)
    low, high = (k_low, k_high) if filters.renormalised else (1.0, 1.0)
    goal = filters.top_ps * high
    p_mass = torch.where(
        found_mass >= goal, _with_ties(probs, found & (before <= goal[:, None])), goal + 1 / LIKELY
    )
    by_p = found & (before <= (filters.top_ps * low)[:, None])
    least = (filters.min_ps * probs[:, 0])[:, None]
    by_m = found & (probs >= least)
    m_mass = torch.where(least.squeeze(1) * LIKELY >= 1, _with_ties(probs, by_m), 1.0)
    floor = logprobs.masked_fill(~(by_k & by_p & by_m), float("inf")).amin(dim=-1)
    return Kept(floor, torch.stack([k_high, p_mass, m_mass]).amin(dim=0).clamp_(max=1.0))


def _with_ties(probs: Tensor, inside: Tensor) -> Tensor:
    """The mass of a prefix of descending probs, and of the tokens after it that equal its last one."""
    least = probs.masked_fill(~inside, float("inf")).amin(dim=-1, keepdim=True)
    return (probs * (probs >= least)).sum(dim=-1)


def filtered_probs(logits: Tensor, filters: Filters) -> Tensor:
    """logits [R, vocab] -> the probabilities [R, vocab] that plain decoding samples from; rows sum to 1."""
    probs = (logits / filters.temperatures[:, None]).softmax(dim=-1)
    if not filters.any:
        return probs
    probs = (_filter_by_kernels if probs.is_cuda else _filter_by_sorting)(probs, filters)
    return probs / probs.sum(dim=-1, keepdim=True)


def _filter_by_kernels(probs: Tensor, filters: Filters) -> Tensor:
    from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob  # only where there is a GPU

    by_k = top_k_renorm_prob(probs, filters.top_ks) if filters.top_k else probs
    if filters.top_p:
        by_p = top_p_renorm_prob(by_k if filters.renormalised else probs, filters.top_ps)
        by_k = by_k.masked_fill(by_p <= 0, 0)
    if filters.min_p:
        by_k = by_k.masked_fill(by_k < by_k.amax(dim=-1, keepdim=True) * filters.min_ps[:, None], 0)
    return by_k


def _filter_by_sorting(probs: Tensor, filters: Filters) -> Tensor:
    ordered = probs.sort(dim=-1, descending=True).values
    by_k = torch.arange(probs.shape[1], device=probs.device) < filters.top_ks[:, None]
    whole = _with_ties(ordered, by_k)[:, None] if filters.renormalised else 1.0
    by_p = ordered.cumsum(dim=-1) - ordered <= filters.top_ps[:, None] * whole
    by_m = ordered >= filters.min_ps[:, None] * ordered[:, :1]
    floor = ordered.masked_fill(~(by_k & by_p & by_m), float("inf")).amin(dim=-1, keepdim=True)
    return probs.masked_fill(probs < floor, 0)
