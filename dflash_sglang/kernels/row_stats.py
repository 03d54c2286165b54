"""Statistics of verified rows, one pass over the logits each: the likeliest token and the normaliser, then the
log-probabilities that are large enough to matter for top-k, top-p and min-p."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

TILE = 4096


class RowStats(NamedTuple):
    """Of R rows of logits at their temperatures."""

    argmax: torch.Tensor  # [R] int64, the lowest id among equals
    log_normaliser: torch.Tensor  # [R] float32, logsumexp(logits / temperature)


def row_stats(logits: torch.Tensor, temperatures: torch.Tensor) -> RowStats:
    """logits [R, vocab] float32, rows contiguous; temperatures [R], positive."""
    return (row_stats_triton if logits.is_cuda else row_stats_torch)(logits, temperatures)


def row_stats_torch(logits: torch.Tensor, temperatures: torch.Tensor) -> RowStats:
    """The definition of `row_stats` in torch operations."""
    return RowStats(logits.argmax(dim=-1), (logits.float() / temperatures[:, None]).logsumexp(dim=-1))


def row_stats_triton(logits: torch.Tensor, temperatures: torch.Tensor) -> RowStats:
    rows, vocab = logits.shape
    out = RowStats(
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
    )
    _row_stats_kernel[(rows,)](logits, temperatures, *out, vocab, logits.stride(0), TILE=TILE, num_warps=8)
    return out


def likely_logprobs(
    logits: torch.Tensor, temperatures: torch.Tensor, log_normaliser: torch.Tensor, at_most: int
) -> torch.Tensor:
    """[R, min(at_most, vocab)] float32, descending: the log-probabilities >= -log(at_most) of each row, of which
    there are no more than `at_most` since probabilities add up to 1; the rest -inf.

    logits [R, vocab] float32, temperatures and log_normaliser [R].
    """
    function = likely_logprobs_triton if logits.is_cuda else likely_logprobs_torch
    return function(logits, temperatures, log_normaliser, at_most)


def likely_logprobs_torch(
    logits: torch.Tensor, temperatures: torch.Tensor, log_normaliser: torch.Tensor, at_most: int
) -> torch.Tensor:
    """The definition of `likely_logprobs` in torch operations."""
    logprobs = logits.float() / temperatures[:, None] - log_normaliser[:, None]
    likeliest = logprobs.topk(min(at_most, logits.shape[1]), dim=-1).values
    return likeliest.masked_fill_(likeliest < _floor(at_most), float("-inf"))


def likely_logprobs_triton(
    logits: torch.Tensor, temperatures: torch.Tensor, log_normaliser: torch.Tensor, at_most: int
) -> torch.Tensor:
    rows, vocab = logits.shape
    width = min(at_most, vocab)
    out = torch.full((rows, width), float("-inf"), device=logits.device)
    _likely_kernel[(rows,)](
        logits, temperatures, log_normaliser, out, vocab, logits.stride(0), _floor(at_most), width,
        TILE=TILE, num_warps=8,
    )  # fmt: skip
    return out.sort(dim=-1, descending=True).values


def _floor(at_most: int) -> float:
    return -math.log(at_most)


@triton.jit
def _row_stats_kernel(
    logits_ptr, temperature_ptr, argmax_ptr, log_normaliser_ptr, vocab, row_stride, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = tl.zeros((TILE,), tl.int32)
    total = tl.zeros((TILE,), tl.float32)  # sum of exp((logit - best) / temperature), lane by lane
    for start in range(0, vocab, TILE):
        ids = start + lane
        logit = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf"))
        larger = tl.maximum(best, logit)
        # -inf - -inf: a lane that has seen nothing finite stays at 0.
        kept = tl.where(best == float("-inf"), 0.0, total * tl.exp((best - larger) / temperature))
        total = kept + tl.where(logit == float("-inf"), 0.0, tl.exp((logit - larger) / temperature))
        best_id = tl.where(logit > best, ids, best_id)
        best = larger
    top = tl.max(best, axis=0)
    first = tl.min(tl.where(best == top, best_id, 2147483647), axis=0)
    total = tl.where(best == float("-inf"), 0.0, total * tl.exp((best - top) / temperature))
    tl.store(argmax_ptr + row, first.to(tl.int64))
    tl.store(log_normaliser_ptr + row, top / temperature + tl.log(tl.sum(total, axis=0)))


@triton.jit
def _likely_kernel(
    logits_ptr, temperature_ptr, log_normaliser_ptr, out_ptr, vocab, row_stride, floor, width,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    log_normaliser = tl.load(log_normaliser_ptr + row)
    lane = tl.arange(0, TILE)
    found = 0
    for start in range(0, vocab, TILE):
        ids = start + lane
        logit = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=float("-inf"))
        # Rounded as torch divides: a caller finds the same values in the logits again.
        logprob = tl.div_rn(logit, temperature) - log_normaliser
        likely = (logprob >= floor).to(tl.int32)
        count = tl.sum(likely, axis=0)
        if count > 0:
            place = found + tl.cumsum(likely, axis=0) - 1
            tl.store(out_ptr + row * width + place, logprob, mask=(likely > 0) & (place < width))
            found += count
