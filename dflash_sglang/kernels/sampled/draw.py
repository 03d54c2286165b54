"""The token after the accepted proposals: its row's residual distribution chunk by chunk, then a draw from it."""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_sglang.kernels.sampled.cuts import narrowed
from dflash_sglang.kernels.sampled.rows import BY_WIDTH, FIELDS, span_of


@triton.jit
def _left(
    ids, row_ptr, candidate_ptr, prob_ptr, proposal, rejects, vocab, base, inverse, min_p, cut, mass,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Weights of a chunk's tokens `ids` that filters keep, less what the proposal could have taken of each; and
    without that, but for the proposal. A row that rejects nothing: what the filters keep, twice."""
    logit = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    weight = tl.exp((logit - base) * inverse)
    kept = tl.where((logit > cut) & (weight >= min_p), weight, 0.0)
    left = kept
    if rejects:
        kept = tl.where(ids == proposal, 0.0, kept)
        for k in tl.static_range(WIDTH):
            candidate = tl.load(candidate_ptr + k)
            its_logit = tl.load(row_ptr + candidate).to(tl.float32)
            its_weight = tl.exp((its_logit - base) * inverse)
            its_weight = tl.where((its_logit > cut) & (its_weight >= min_p), its_weight, 0.0)
            taken = tl.minimum(its_weight, tl.load(prob_ptr + k) * mass)
            left = tl.where(ids == candidate, tl.maximum(left - taken, 0.0), left)
        left = tl.where(ids == proposal, 0.0, left)
    return left, kept


@triton.jit(do_not_specialize=BY_WIDTH)
def residual_kernel(
    logits_ptr, tokens_ptr, candidates_ptr, probs_ptr, starts_ptr, lens_ptr,
    temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
    row_base_ptr, row_total_ptr, row_logit_ptr, row_prob_ptr, uniforms_ptr,
    stop_ptr, searches_ptr, searched_ptr, brackets_ptr, splits_ptr, sums_ptr, likely_ptr,
    number_ptr, cut_ptr, mass_ptr, left_ptr, kept_ptr,  # [bs], [bs], [bs], [bs, chunks], [bs, chunks], written
    vocab, row_stride, token_stride, candidate_stride, candidate_step, prob_stride, prob_step, chunks, block,
    ragged,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, CHUNK_LANES: tl.constexpr, WAYS: tl.constexpr,
    FILTERED: tl.constexpr, RENORMALISED: tl.constexpr,
):  # fmt: skip
    """Per request and chunk: settles the searched rows, and with them how many proposals are accepted, where the
    filters cut the row that draws and what mass they keep; adds up what that row's chunk has left."""
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    start, rows = span_of(request, starts_ptr, lens_ptr, block, ragged)
    inverse = 1.0 / tl.load(temperatures_ptr + request)
    stop = tl.load(stop_ptr + request)
    mass = tl.load(row_total_ptr + request * block + stop)
    cut = mass * 0.0 + float("-inf")
    min_p = mass * 0.0
    if FILTERED:
        top_k = tl.load(top_ks_ptr + request)
        top_p = tl.load(top_ps_ptr + request)
        min_p = tl.load(min_ps_ptr + request)
        lanes = tl.arange(0, CHUNK_LANES)
        last = stop
        going = stop >= 0
        for index in range(tl.load(searches_ptr + request)):
            place = tl.load(searched_ptr + request * block + index)
            row = request * block + place
            base, total = tl.load(row_base_ptr + row), tl.load(row_total_ptr + row)
            low_k, _, _, mass_k, _, _, low_p, _, mass_p, _, _ = narrowed(
                brackets_ptr + row * FIELDS, splits_ptr + row * 2 * WAYS, sums_ptr + row * chunks * 3 * WAYS,
                chunks, top_k, top_p, total, base, inverse,
                WAYS, CHUNK_LANES, RENORMALISED, True,
            )  # fmt: skip
            low = tl.maximum(low_k, low_p)
            likely = tl.load(likely_ptr + row * chunks + lanes, mask=lanes < chunks, other=0.0)
            kept = tl.minimum(tl.minimum(mass_k, mass_p), tl.sum(likely, axis=0))
            logit, prob = tl.load(row_logit_ptr + row), tl.load(row_prob_ptr + row)
            weight = tl.exp((logit - base) * inverse)
            weight = tl.where((logit > low) & (weight >= min_p), weight, 0.0)
            chance = tl.minimum(weight, prob * kept) / (prob * kept)
            accepts = (place < stop) & (tl.load(uniforms_ptr + request * (block + 1) + place) < chance)
            ends = going & (accepts == 0)
            last = tl.where(ends, place, last)
            cut = tl.where(ends, low, cut)
            mass = tl.where(ends, kept, mass)
            going = going & accepts
        stop = last
    rejects = stop < rows - 1
    row = request * block + stop
    proposal = tl.load(tokens_ptr + request * token_stride + stop + 1, mask=rejects, other=-1).to(tl.int64)
    left, kept = _left(
        chunk * CHUNK + tl.arange(0, CHUNK), logits_ptr + (start + stop) * row_stride,
        candidates_ptr + request * candidate_stride + stop * candidate_step,
        probs_ptr + request * prob_stride + stop * prob_step,
        proposal, rejects, vocab, tl.load(row_base_ptr + row), inverse, min_p, cut, mass, WIDTH,
    )  # fmt: skip
    tl.store(left_ptr + request * chunks + chunk, tl.sum(left, axis=0))
    tl.store(kept_ptr + request * chunks + chunk, tl.sum(kept, axis=0))
    if chunk == 0:
        tl.store(number_ptr + request, stop)
        tl.store(cut_ptr + request, cut)
        tl.store(mass_ptr + request, mass)


@triton.jit
def _pick(weights, lane, coin, LANES: tl.constexpr):
    """The lane that `coin` in [0, 1) falls to, each in proportion to its weight; the last with one if rounding
    leaves it to none, -1 without any."""
    sums = tl.cumsum(weights, axis=0)
    hit = (sums > coin * tl.sum(weights, axis=0)) & (weights > 0)
    first = tl.min(tl.where(hit, lane, LANES), axis=0)
    return tl.where(first < LANES, first, tl.max(tl.where(weights > 0, lane, -1), axis=0))


@triton.jit(do_not_specialize=BY_WIDTH)
def pick_kernel(
    logits_ptr, tokens_ptr, candidates_ptr, probs_ptr, starts_ptr, lens_ptr,
    temperatures_ptr, top_ks_ptr, min_ps_ptr,
    row_base_ptr, row_best_ptr, uniforms_ptr, number_ptr, cut_ptr, mass_ptr, left_ptr, kept_ptr,
    rng_ptr, target_ids_ptr,  # [2], [rows], written
    vocab, row_stride, token_stride, candidate_stride, candidate_step, prob_stride, prob_step, chunks, block,
    ragged,
    WIDTH: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, CHUNK_LANES: tl.constexpr,
    FILTERED: tl.constexpr,
):  # fmt: skip
    """Per request: draws a chunk by what it has left, a token of it, and writes the target's tokens."""
    request = tl.program_id(0).to(tl.int64)
    start, rows = span_of(request, starts_ptr, lens_ptr, block, ragged)
    stop = tl.load(number_ptr + request)
    row = request * block + stop
    lanes = tl.arange(0, CHUNK_LANES)
    places = request * chunks + lanes
    sums = tl.load(left_ptr + places, mask=lanes < chunks, other=0.0)
    rounded = tl.sum(sums, axis=0) <= 0  # nothing is left but rounding
    sums = tl.where(rounded, tl.load(kept_ptr + places, mask=lanes < chunks, other=0.0), sums)
    coins = uniforms_ptr + request * (block + 1) + block - 1
    chunk = tl.maximum(_pick(sums, lanes, tl.load(coins), CHUNK_LANES), 0)

    min_p = tl.load(row_base_ptr + row) * 0.0
    if FILTERED:
        min_p = tl.load(min_ps_ptr + request)
    rejects = stop < rows - 1
    proposal = tl.load(tokens_ptr + request * token_stride + stop + 1, mask=rejects, other=-1).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    left, kept = _left(
        chunk * CHUNK + lane, logits_ptr + (start + stop) * row_stride,
        candidates_ptr + request * candidate_stride + stop * candidate_step,
        probs_ptr + request * prob_stride + stop * prob_step,
        proposal, rejects, vocab, tl.load(row_base_ptr + row), 1.0 / tl.load(temperatures_ptr + request),
        min_p, tl.load(cut_ptr + request), tl.load(mass_ptr + request), WIDTH,
    )  # fmt: skip
    picked = _pick(tl.where(rounded, kept, left), lane, tl.load(coins + 1), CHUNK)
    best = tl.load(row_best_ptr + row)
    greedy = tl.load(top_ks_ptr + request) <= 1
    drawn = tl.where(greedy | (picked < 0), best, chunk * CHUNK + picked).to(tl.int64)

    place = tl.arange(0, LANES)
    proposed = tl.load(tokens_ptr + request * token_stride + place + 1, mask=place < rows - 1, other=0).to(
        tl.int64
    )
    committed = tl.where(place < stop, proposed, tl.where(place == stop, drawn, 0))
    tl.store(target_ids_ptr + start + place, committed, mask=place < rows)
    if request == 0:
        tl.store(rng_ptr + 1, tl.load(rng_ptr + 1) + 1)
