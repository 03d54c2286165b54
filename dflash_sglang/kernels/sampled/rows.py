"""What one pass over all verified rows says of each of them, and which proposals that already decides."""

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr(2147483647)
TINY = tl.constexpr(1.1754944e-38)
DROPPED = tl.constexpr(20.0)  # a top-k keeps no token less likely than exp(-DROPPED) / vocab of the likeliest
FIELDS = tl.constexpr(16)  # floats of a row's brackets: 0..5 of top-k, 6..10 of top-p
# What differs by the width of a step: one compilation serves all of them.
BY_WIDTH = ["block", "ragged", "token_stride", "candidate_stride", "candidate_step", "prob_stride", "prob_step"]


@triton.jit
def span_of(request, starts_ptr, lens_ptr, block, ragged):
    """A request's first row among the logits, and how many it has: a whole block unless they are ragged."""
    start = tl.load(starts_ptr + request, mask=ragged != 0, other=0).to(tl.int64)
    rows = tl.load(lens_ptr + request, mask=ragged != 0, other=0)
    return tl.where(ragged != 0, start, request * block), tl.where(ragged != 0, rows, block)


@triton.jit(do_not_specialize=BY_WIDTH)
def chunk_stats_kernel(
    logits_ptr, tokens_ptr, starts_ptr, lens_ptr, temperatures_ptr,
    best_ptr, best_id_ptr, total_ptr, above_ptr, reached_ptr, count_ptr,  # [rows, chunks]
    vocab, row_stride, token_stride, chunks, block, ragged,
    CHUNK: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """Per row and chunk of the vocabulary: the largest logit and its lowest id; the mass of the chunk relative to
    it; and, for filters, the mass of the tokens above the row's proposal and of those not below it, and the number
    of those above it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    request = row // block
    place = row % block
    start, rows = span_of(request, starts_ptr, lens_ptr, block, ragged)
    if place >= rows:
        return
    row_ptr = logits_ptr + (start + place) * row_stride
    inverse = 1.0 / tl.load(temperatures_ptr + request)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(logit, axis=0)
    weight = tl.exp((logit - tl.where(best == float("-inf"), 0.0, best)) * inverse)
    out = row * chunks + chunk
    tl.store(best_ptr + out, best)
    tl.store(best_id_ptr + out, tl.min(tl.where(logit == best, ids, NO_ID), axis=0))
    tl.store(total_ptr + out, tl.sum(weight, axis=0))
    if FILTERED:
        proposes = place < rows - 1
        proposal = tl.load(tokens_ptr + request * token_stride + place + 1, mask=proposes, other=0).to(tl.int64)
        proposed = tl.load(row_ptr + proposal).to(tl.float32)
        tl.store(above_ptr + out, tl.sum(tl.where(logit > proposed, weight, 0.0), axis=0))
        tl.store(reached_ptr + out, tl.sum(tl.where(logit >= proposed, weight, 0.0), axis=0))
        tl.store(count_ptr + out, tl.sum((logit > proposed).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=BY_WIDTH)
def verdict_kernel(
    logits_ptr, tokens_ptr, candidates_ptr, probs_ptr, starts_ptr, lens_ptr, rng_ptr,
    temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
    best_ptr, best_id_ptr, total_ptr, above_ptr, reached_ptr, count_ptr,  # [rows, chunks]
    row_base_ptr, row_total_ptr, row_best_ptr, row_logit_ptr, row_prob_ptr,  # [rows], written as the rest
    uniforms_ptr,  # [bs, block + 1]
    stop_ptr, searches_ptr, searched_ptr, brackets_ptr,  # [bs], [bs], [bs, block], [rows, FIELDS]
    vocab, row_stride, token_stride, candidate_stride, candidate_step, prob_stride, prob_step, chunks, block,
    ragged,
    WIDTH: tl.constexpr, WIDTH_LANES: tl.constexpr, LANES: tl.constexpr, CHUNK_LANES: tl.constexpr,
    FILTERED: tl.constexpr, RENORMALISED: tl.constexpr,
):  # fmt: skip
    """Per request: joins the chunks of its rows, tosses their coins and finds the first row that surely does not
    take its proposal. What a row's filters keep lies between bounds; where the coin falls between those too, and
    where a filtered row is to draw, the row is put on the list of rows to search, with the brackets to start from.
    """
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    chunk = tl.arange(0, CHUNK_LANES)
    start, number = span_of(request, starts_ptr, lens_ptr, block, ragged)
    live = lane < number
    proposes = lane < number - 1
    rows = request * block + lane
    at = rows[:, None] * chunks + chunk[None, :]
    inside = live[:, None] & (chunk < chunks)[None, :]
    temperature = tl.load(temperatures_ptr + request)
    inverse = 1.0 / temperature

    chunk_best = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    best = tl.max(chunk_best, axis=1)
    base = tl.where(best == float("-inf"), 0.0, best)
    ids = tl.load(best_id_ptr + at, mask=inside, other=NO_ID)
    best_id = tl.min(tl.where(chunk_best == best[:, None], ids, NO_ID), axis=1)
    best_id = tl.minimum(best_id, vocab - 1)  # of a row that is no number, whose tokens the next step embeds
    scale = tl.exp((chunk_best - base[:, None]) * inverse)
    total = tl.sum(tl.load(total_ptr + at, mask=inside, other=0.0) * scale, axis=1)

    proposal = tl.load(tokens_ptr + request * token_stride + lane + 1, mask=proposes, other=0).to(tl.int64)
    row_ptr = logits_ptr + (start + lane) * row_stride
    logit = tl.load(row_ptr + proposal, mask=proposes, other=float("-inf")).to(tl.float32)
    weight = tl.exp((logit - base) * inverse)
    k = tl.arange(0, WIDTH_LANES)[None, :]
    offered = proposes[:, None] & (k < WIDTH)
    candidate_at = request * candidate_stride + lane[:, None] * candidate_step + k
    candidate = tl.load(candidates_ptr + candidate_at, mask=offered, other=-1)
    q = tl.load(probs_ptr + request * prob_stride + lane[:, None] * prob_step + k, mask=offered, other=0.0)
    prob = tl.sum(tl.where(candidate == proposal[:, None], q, 0.0), axis=1)
    prob = tl.minimum(tl.maximum(prob, TINY), 1.0)

    step = tl.load(rng_ptr + 1)
    zero = lane * 0
    bits, _, _, _ = tl.philox(
        tl.load(rng_ptr), lane, zero + request.to(tl.int32),
        zero + (step % 2147483648).to(tl.int32), zero + (step // 2147483648).to(tl.int32),
    )  # fmt: skip
    coin = tl.uint_to_uniform_float(bits)
    tl.store(uniforms_ptr + request * (block + 1) + lane, coin, mask=lane < block + 1)

    top_k = tl.load(top_ks_ptr + request + zero)
    greedy = top_k <= 1
    kept_least, kept_most = total, total
    stays, goes = proposes, lane < 0
    filtered = top_k < 0
    if FILTERED:
        top_p = tl.load(top_ps_ptr + request + zero)
        min_p = tl.load(min_ps_ptr + request + zero)
        by_k, by_p, by_m = top_k < vocab, top_p < 1.0, min_p > 0.0
        filtered = (by_k | by_p | by_m) & (greedy == 0)
        above = tl.sum(tl.load(above_ptr + at, mask=inside, other=0.0) * scale, axis=1)
        reached = tl.sum(tl.load(reached_ptr + at, mask=inside, other=0.0) * scale, axis=1)
        count = tl.sum(tl.load(count_ptr + at, mask=inside, other=0), axis=1)
        goal = top_p * total
        kept_most = tl.where(by_p & (reached > goal), reached, total)
        kept_least = tl.where(filtered, reached, total)
        kept_least = tl.where(by_p & (by_k == 0) & (by_m == 0), tl.maximum(reached, goal), kept_least)
        goes = (by_k & (count >= top_k)) | (by_p & (above > goal)) | (by_m & (weight < min_p))
        if RENORMALISED:
            goal = top_p * tl.where(by_k, reached, total)
        stays = proposes & (goes == 0) & ((by_p == 0) | (above <= goal))
        # Where each filter's bisection starts: what is kept begins above the first and not above the second.
        below = base - tl.maximum(tl.abs(base) * 2.4e-7, 1e-30)
        size = tl.log(vocab.to(tl.float32))
        low_k = tl.minimum(base - temperature * (size + DROPPED), below)
        low_p = tl.minimum(base + temperature * (tl.log(tl.maximum(total * (1 - top_p), TINY)) - size - 1), below)
        fields = brackets_ptr + rows * FIELDS
        tl.store(fields, tl.where(by_k, low_k, float("-inf")), mask=live)
        tl.store(fields + 1, base, mask=live)
        tl.store(fields + 2, tl.zeros((LANES,), tl.float32), mask=live)
        tl.store(fields + 3, total, mask=live)
        tl.store(fields + 4, tl.where(by_k, 0.0, total), mask=live)
        tl.store(fields + 5, tl.where(by_k, 1.0, tl.zeros((LANES,), tl.float32)), mask=live)
        tl.store(fields + 6, tl.where(by_p, low_p, float("-inf")), mask=live)
        tl.store(fields + 7, base, mask=live)
        tl.store(fields + 8, total, mask=live)
        tl.store(fields + 9, tl.zeros((LANES,), tl.float32), mask=live)
        tl.store(fields + 10, tl.where(by_p, 1.0, tl.zeros((LANES,), tl.float32)), mask=live)

    surely = tl.where(stays, tl.minimum(weight / tl.maximum(kept_most, TINY), prob) / prob, 0.0)
    perhaps = tl.where(goes | (weight <= 0.0), 0.0, tl.minimum(weight / tl.maximum(kept_least, TINY), prob) / prob)
    accepts = tl.where(greedy, proposal == best_id, coin < surely) & proposes
    rejects = tl.where(greedy, proposal != best_id, coin >= perhaps) | (lane == number - 1)
    stop = tl.min(tl.where(rejects, lane, number - 1), axis=0)
    searched = filtered & (((lane < stop) & (accepts == 0)) | (lane == stop))
    rank = tl.cumsum(searched.to(tl.int32), axis=0) - 1
    tl.store(searched_ptr + request * block + rank, lane, mask=searched)
    tl.store(searches_ptr + request, tl.sum(searched.to(tl.int32), axis=0))
    tl.store(stop_ptr + request, stop)
    tl.store(row_base_ptr + rows, base, mask=live)
    tl.store(row_total_ptr + rows, total, mask=live)
    tl.store(row_best_ptr + rows, best_id, mask=live)
    tl.store(row_logit_ptr + rows, logit, mask=live)
    tl.store(row_prob_ptr + rows, prob, mask=live)
