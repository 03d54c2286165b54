"""Where top-k and top-p cut a row: brackets around the cut, narrowed by one launch after the other.

A filter keeps the tokens at which the number (top-k) or the mass (top-p) of likelier ones has not passed its goal,
so what it keeps is {logit > cut} for a cut between two of the row's logits. A bracket (low, high] holds the least
logit that is kept. Each launch splits the brackets of the searched rows into WAYS parts, all chunks of the
vocabulary at once; the next launch adds the chunks up and goes on with one part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dflash_sglang.kernels.sampled.rows import BY_WIDTH, FIELDS, span_of


@triton.jit
def _item(values, way, index):
    return tl.sum(tl.where(way == index, values, 0.0), axis=0)


@triton.jit
def narrowed(
    brackets_ptr, splits_ptr, sums_ptr,  # of one row: [FIELDS], [2, WAYS], [chunks, 3, WAYS]
    chunks, top_k, top_p, total, base, inverse,
    WAYS: tl.constexpr, CHUNK_LANES: tl.constexpr, RENORMALISED: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The brackets after what the last launch added up: of top-k (low, high, number above high, mass above low,
    mass above high, open) and of top-p (low, high, mass above low, mass above high, open). LAST: takes the low end
    of top-k's for the cut."""
    low_k, high_k, count = tl.load(brackets_ptr), tl.load(brackets_ptr + 1), tl.load(brackets_ptr + 2)
    mass_k, rest_k, open_k = tl.load(brackets_ptr + 3), tl.load(brackets_ptr + 4), tl.load(brackets_ptr + 5)
    low_p, high_p = tl.load(brackets_ptr + 6), tl.load(brackets_ptr + 7)
    mass_p, rest_p, open_p = tl.load(brackets_ptr + 8), tl.load(brackets_ptr + 9), tl.load(brackets_ptr + 10)
    way = tl.arange(0, WAYS)
    chunk = tl.arange(0, CHUNK_LANES)
    at = chunk[:, None] * (3 * WAYS) + way[None, :]
    inside = (chunk < chunks)[:, None]
    if open_k > 0:
        split = tl.load(splits_ptr + way)
        counts = tl.sum(tl.load(sums_ptr + at, mask=inside, other=0.0), axis=0)
        masses = tl.sum(tl.load(sums_ptr + WAYS + at, mask=inside, other=0.0), axis=0)
        low = tl.sum((counts > top_k - 1).to(tl.int32), axis=0) - 1  # splits ascend, sums descend
        first = tl.maximum(low, 0)
        over = low + 1 < WAYS
        low_k = _item(split, way, first)
        mass_k = _item(masses, way, first)
        high_k = tl.where(over, _item(split, way, low + 1), high_k)
        count = tl.where(over, _item(counts, way, low + 1), count)
        rest_k = tl.where(over, _item(masses, way, low + 1), rest_k)
        open_k = tl.where((low >= 0) & (_item(counts, way, first) - count > 1), 1.0, 0.0)
        rest_k = tl.where(open_k > 0, rest_k, mass_k)
    if open_p > 0:
        goal = top_p * total
        sure = goal
        if RENORMALISED:
            goal = top_p * mass_k
            sure = goal if LAST else top_p * rest_k
        split = tl.load(splits_ptr + WAYS + way)
        masses = tl.sum(tl.load(sums_ptr + 2 * WAYS + at, mask=inside, other=0.0), axis=0)
        first = tl.maximum(tl.sum((masses > goal).to(tl.int32), axis=0) - 1, 0)
        high = tl.sum((masses > sure).to(tl.int32), axis=0)
        low_p = _item(split, way, first)
        mass_p = _item(masses, way, first)
        high_p = tl.where(high < WAYS, _item(split, way, high), high_p)
        rest_p = tl.where(high < WAYS, _item(masses, way, high), rest_p)
        # A bracket with the mass of less than two of its tokens holds one, where rounding cannot feign that.
        least = tl.exp((low_p - base) * inverse)
        alone = (mass_p - rest_p < 1.5 * least) & (least > 1e-5 * total)
        open_p = tl.where((high > 0) & ((alone == 0) | (sure < goal)), 1.0, 0.0)
    return low_k, high_k, count, mass_k, rest_k, open_k, low_p, high_p, mass_p, rest_p, open_p


@triton.jit(do_not_specialize=BY_WIDTH)
def cut_kernel(
    logits_ptr, starts_ptr, lens_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, min_ps_ptr,
    row_base_ptr, row_total_ptr, searches_ptr, searched_ptr,  # [rows], [rows], [bs], [bs, block]
    old_brackets_ptr, old_splits_ptr, old_sums_ptr,  # [rows, FIELDS], [rows, 2, WAYS], [rows, chunks, 3, WAYS]
    brackets_ptr, splits_ptr, sums_ptr,  # alike, written
    likely_ptr,  # [rows, chunks], written by the FIRST: mass of the tokens that min-p keeps
    vocab, row_stride, chunks, block, ragged,
    CHUNK: tl.constexpr, CHUNK_LANES: tl.constexpr, WAYS: tl.constexpr,
    RENORMALISED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Narrows the brackets of a request's searched rows and adds up one chunk above their next splits."""
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    start, _ = span_of(request, starts_ptr, lens_ptr, block, ragged)
    inverse = 1.0 / tl.load(temperatures_ptr + request)
    top_k = tl.load(top_ks_ptr + request)
    top_p = tl.load(top_ps_ptr + request)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    for index in range(tl.load(searches_ptr + request)):
        place = tl.load(searched_ptr + request * block + index)
        row = request * block + place
        base, total = tl.load(row_base_ptr + row), tl.load(row_total_ptr + row)
        old = old_brackets_ptr + row * FIELDS
        if FIRST:
            low_k, high_k, count = tl.load(old), tl.load(old + 1), tl.load(old + 2)
            mass_k, rest_k, open_k = tl.load(old + 3), tl.load(old + 4), tl.load(old + 5)
            low_p, high_p = tl.load(old + 6), tl.load(old + 7)
            mass_p, rest_p, open_p = tl.load(old + 8), tl.load(old + 9), tl.load(old + 10)
        else:
            low_k, high_k, count, mass_k, rest_k, open_k, low_p, high_p, mass_p, rest_p, open_p = narrowed(
                old, old_splits_ptr + row * 2 * WAYS, old_sums_ptr + row * chunks * 3 * WAYS,
                chunks, top_k, top_p, total, base, inverse,
                WAYS, CHUNK_LANES, RENORMALISED, False,
            )  # fmt: skip
        if chunk == 0:
            new = brackets_ptr + row * FIELDS
            tl.store(new, low_k)
            tl.store(new + 1, high_k)
            tl.store(new + 2, count)
            tl.store(new + 3, mass_k)
            tl.store(new + 4, rest_k)
            tl.store(new + 5, open_k)
            tl.store(new + 6, low_p)
            tl.store(new + 7, high_p)
            tl.store(new + 8, mass_p)
            tl.store(new + 9, rest_p)
            tl.store(new + 10, open_p)
        wanted = open_k + open_p
        if FIRST:
            wanted += 1.0
        if wanted > 0:
            splits = splits_ptr + row * 2 * WAYS
            sums = sums_ptr + (row * chunks + chunk) * (3 * WAYS)
            row_ptr = logits_ptr + (start + place) * row_stride
            logit = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
            weight = tl.exp((logit - base) * inverse)
            if FIRST:
                likely = weight >= tl.load(min_ps_ptr + request)
                tl.store(likely_ptr + row * chunks + chunk, tl.sum(tl.where(likely, weight, 0.0), axis=0))
            # What was compared is what is stored: computed again, a split might be rounded to another number.
            if open_k > 0:
                for j in tl.static_range(WAYS):
                    split = low_k + (high_k - low_k) * (j / WAYS)
                    above = logit > split
                    tl.store(sums + j, tl.sum(above.to(tl.float32), axis=0))
                    tl.store(sums + WAYS + j, tl.sum(tl.where(above, weight, 0.0), axis=0))
                    if chunk == 0:
                        tl.store(splits + j, split)
            if open_p > 0:
                for j in tl.static_range(WAYS):
                    split = low_p + (high_p - low_p) * (j / WAYS)
                    tl.store(sums + 2 * WAYS + j, tl.sum(tl.where(logit > split, weight, 0.0), axis=0))
                    if chunk == 0:
                        tl.store(splits + WAYS + j, split)
