"""The target's distribution at a row: temperature, top-k, top-p and min-p as SGLang's sampler filters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dflash_sglang.kernels.sampled.tokens import RowFilters

if TYPE_CHECKING:
    from dflash_sglang.sglang_names.scheduler import SamplingBatchInfo


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
