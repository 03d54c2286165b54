"""Copies: where a request's last tokens stood before in its own text, and the tokens after them as proposals.

Two launches per step, which a graph may hold: `find_copies` searches, `write_copies` learns from the step before
and proposes. Steps that verify more rows than a block have `extend_copies` behind them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_sglang.kernels.block.pack_rows import Rows
from dflash_sglang.kernels.head.pack_shard import Candidates

LONGEST = 32  # tokens of a match that are compared
# Chosen on the texts of bench/copies.py. Lengths from 1 to 8 and a gain of 1.1 give 0.96 to 1.02 times the tokens
# a step, in one kind of text more and in another less.
LEAST = 4  # tokens of a match that counts
GAIN = 1.2  # by so much a copy has to promise more than the draft
# A record is sums that fade by this factor with each new observation, and starts as if it had these.
FADE = 1 - 1 / 32
FIRST_FAILED, FIRST_EXPECTED = 10.5, 3.0
DRAFTED, COPIED = 1, 2  # what a step verified
_PROPOSED_BY, _PREFIX, _LENGTH, _STEPS, _TOKENS = range(5)  # columns of `CopyTables.last`
FAILED = 0  # column of `CopyTables.record`; infinite: nothing is copied
_CHUNK = 256  # positions searched by one program at a time
_AT_ONCE = 8  # tokens before each of them that are compared at once: each comparison waits for two reads
_CHANCES = ((1, 0.55), (2, 0.38), (3, 0.25), (4, 0.16), (6, 0.11), (8, 0.08), (12, 0.055), (16, 0.04), (32, 0.015))


class CopyTables(NamedTuple):
    """What steps keep for copies."""

    history: Tensor  # [slots] int32, the token whose KV a slot holds; -1 matches nothing and ends a copy
    req_to_token: Tensor  # [rows, row_width] int32 slots
    matches: Tensor  # [max_requests] int64, of the batch: length << 32 | position after the match; 0 between steps
    record: Tensor  # [rows, 2] float32, faded sums: failed copies, failures expected of the prior
    # [rows, 4 + longest - 1] int64, of the step before: DRAFTED, COPIED or 0; prefix; match length; proposals that
    # were verified; what the copy is or would have been, as long as the longest chain, then -1
    last: Tensor
    chances: Tensor  # [LONGEST + 1] float32, the prior chance that a copied token is wrong, by length of the match
    # [5] int64 ever: copies proposed, their tokens within blocks, those accepted, their match lengths, and their
    # tokens beyond blocks
    counts: Tensor
    # [max_requests] float32, of the batch: the chance that a token of a copy is right, 0 where nothing is copied
    promised: Tensor

    @classmethod
    def allocate(cls, slots: int, req_to_token: Tensor, longest: int) -> CopyTables:
        """Tables for slots 0 to slots - 1 that have seen nothing. longest: rows that a step verifies of a request,
        at most."""
        rows, device = req_to_token.shape[0], req_to_token.device
        chances = torch.ones(LONGEST + 1)
        for shortest, chance in _CHANCES:
            chances[shortest:] = chance
        return cls(
            torch.full((slots,), -1, dtype=torch.int32, device=device),
            req_to_token,
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros((rows, 2), device=device),
            torch.zeros((rows, _TOKENS + longest - 1), dtype=torch.int64, device=device),
            chances.to(device),
            torch.zeros(5, dtype=torch.int64, device=device),
            torch.zeros(rows, device=device),
        )


class CopyRows(NamedTuple):
    """The blocks of a step. `write_copies` writes tokens, and what they were chosen from as far as it is given."""

    tokens: Tensor  # [bs, block] last committed token + proposals
    slots: Tensor  # [bs, block]
    prefix_lens: Tensor  # [bs]
    requests: Tensor  # [bs] rows of req_to_token
    # [bs, block - 1, K] what proposals were drawn from, with probabilities as `logprobs`
    drawn: Candidates | None = None
    # [bs, block - 1] float32 of the draft's likeliest proposals, any stride between positions; None: blocks of one
    logprobs: Tensor | None = None
    best: Candidates | None = None  # [bs, block - 1, K]


def find_copies(rows: CopyRows, tables: CopyTables, on: Tensor) -> None:
    """Write to `tables.matches` where the longest match of each request's last tokens ends, the latest of equals.

    A match ends before the last token, and has LONGEST tokens at most. on [1]: nothing is done where it is 0.
    """
    (find_copies_triton if rows.tokens.is_cuda else find_copies_torch)(rows, tables, on)


def write_copies(rows: CopyRows, tables: CopyTables, on: Tensor) -> None:
    """Propose the tokens after each match that promises more than the draft's own probabilities do, and write the
    blocks to the history.

    First each request's record learns how far the copy of the step before came true, proposed or not. A copy that
    reaches the end of the text goes on with its own tokens. A copied proposal is certain. Matches become 0.
    on [1]: nothing is done where it is 0.
    """
    (write_copies_triton if rows.tokens.is_cuda else write_copies_torch)(rows, tables, on)


def extend_copies(rows: CopyRows, tables: CopyTables, length: int) -> Rows:
    """Chains [bs, length] that begin with the blocks that `write_copies` has written. Writes them to the history.

    Behind a block go the next tokens of its copy, and behind those, or where nothing was copied, token 0.
    """
    return (extend_copies_triton if rows.tokens.is_cuda else extend_copies_torch)(rows, tables, length)


def find_copies_torch(rows: CopyRows, tables: CopyTables, on: Tensor) -> None:
    """The definition of `find_copies` in torch operations."""
    if not on.item():
        return
    device = rows.tokens.device
    places = torch.arange(int(rows.prefix_lens.max().clamp(min=1)), device=device)
    order = torch.arange(LONGEST, device=device)
    prefix_lens = rows.prefix_lens[:, None]
    last = _text(rows, tables, prefix_lens - order.flip(0))
    last = torch.where(last < 0, -2, last)  # is like no token
    begin = torch.arange(1 - LONGEST, len(places), device=device)
    before = _text(rows, tables, begin.expand(len(last), -1)).unfold(1, LONGEST, 1)  # [bs, places, LONGEST]
    latest = (before != last[:, None]) * (order + 1).to(torch.uint8)
    lengths = torch.where(places < prefix_lens, LONGEST - latest.amax(dim=2).long(), 0)
    tables.matches[: len(last)] = torch.where(lengths > 0, (lengths << 32) | (places + 1), 0).amax(dim=1)


def write_copies_torch(rows: CopyRows, tables: CopyTables, on: Tensor) -> None:
    """The definition of `write_copies` in torch operations."""
    if not on.item():
        return
    tokens, slots, prefix_lens, requests, drawn, logprobs, best = rows
    steps = tokens.shape[1] - 1
    lane = torch.arange(tables.last.shape[1] - _TOKENS, device=tokens.device)
    _learn(rows, tables)
    keys = tables.matches[: len(tokens)].clone()
    tables.matches[: len(tokens)] = 0
    lengths, after = keys >> 32, keys & 0xFFFFFFFF
    lengths = torch.where(lengths >= LEAST, lengths, 0)
    distance = (prefix_lens + 1 - after).clamp(min=1)[:, None]
    copy = _text(rows, tables, after[:, None] + lane % distance)
    copy = torch.where((lengths[:, None] > 0) & ((copy < 0).cumsum(dim=1) == 0), copy, -1)
    right = 1 - chance_of_failure(tables.record[requests], tables.chances[lengths])
    copied = copy[:, :steps] >= 0
    if steps:
        assert logprobs is not None
        copied &= worth_copying(right, logprobs)[:, None]
    kind = torch.where(copied.any(dim=1), COPIED, DRAFTED if steps else 0)
    verified = torch.stack([kind, prefix_lens, lengths, torch.full_like(lengths, steps)], dim=1)
    tables.last[requests] = torch.cat([verified, copy], dim=1)
    copy = copy[:, :steps]
    tables.counts[0] += copied.any(dim=1).sum()
    tables.counts[1] += copied.sum()
    tables.counts[3] += torch.where(copied.any(dim=1), lengths, 0).sum()
    tables.promised[: len(tokens)] = torch.where(copied.any(dim=1), right, 0.0)
    tokens[:, 1:] = torch.where(copied, copy, tokens[:, 1:])
    tables.history[slots] = tokens.int()
    if logprobs is not None:
        logprobs[:] = torch.where(copied, right.log()[:, None], logprobs)
    for candidates, certain, never in ((drawn, torch.ones_like(right), 0.0), (best, right.log(), float("-inf"))):
        if candidates is not None:
            same = (candidates.ids == copy[..., None]) & copied[..., None]  # candidates are distinct
            candidates.ids[:] = torch.where(same, candidates.ids[..., :1], candidates.ids)
            candidates.ids[..., 0] = torch.where(copied, copy, candidates.ids[..., 0])
            first = torch.arange(candidates.ids.shape[2], device=tokens.device) == 0
            value = torch.where(first, certain[:, None, None], never)
            candidates.logprobs[:] = torch.where(copied[..., None], value, candidates.logprobs)


def extend_copies_torch(rows: CopyRows, tables: CopyTables, length: int) -> Rows:
    """The definition of `extend_copies` in torch operations."""
    block = rows.tokens.shape[1]
    last = tables.last[rows.requests]
    copying, copy = last[:, _PROPOSED_BY] == COPIED, last[:, _TOKENS + block - 1 : _TOKENS + length - 1]
    copied = copying[:, None] & (copy >= 0)
    ids = torch.cat([rows.tokens, torch.where(copied, copy, 0)], dim=1)
    positions = rows.prefix_lens[:, None] + torch.arange(length, device=ids.device)
    slots = tables.req_to_token[rows.requests[:, None], positions].long()
    tables.history[slots] = ids.int()
    tables.last[rows.requests, _STEPS] = torch.where(copying, length - 1, block - 1)
    tables.counts[4] += copied.sum()
    return Rows(ids, positions, slots)


def chance_of_failure(record: Tensor, prior: Tensor) -> Tensor:
    """[n] float32, that a copied token is wrong. record [n, 2] of requests, prior [n] of their matches."""
    failed, expected = record[:, 0] + FIRST_FAILED, record[:, 1] + FIRST_EXPECTED
    return (prior * (failed / expected)).clamp(max=1)


def worth_copying(right: Tensor, logprobs: Tensor) -> Tensor:
    """[n] bool: whether a copy promises to commit GAIN times what the draft does. right [n]: the chance that a
    copied token is right; logprobs [n, steps] of the draft's proposals."""
    power, promised = torch.ones_like(right), torch.ones_like(right)
    for _ in range(logprobs.shape[1]):
        power = power * right
        promised = promised + power
    return promised >= GAIN * (1 + logprobs.cumsum(dim=1).exp().sum(dim=1))


def _learn(rows: CopyRows, tables: CopyTables) -> None:
    last, record = tables.last[rows.requests], tables.record[rows.requests]
    committed = rows.prefix_lens - last[:, _PREFIX]
    copy = last[:, _TOKENS:]
    lane = torch.arange(copy.shape[1], device=copy.device)
    truth = _text(rows, tables, torch.minimum(last[:, _PREFIX, None] + 1 + lane, rows.prefix_lens[:, None]))
    live = (last[:, _PROPOSED_BY] > 0) & (committed > 0)
    told = live[:, None] & (lane < torch.minimum(committed, last[:, _STEPS])[:, None]) & (copy >= 0)
    right = told & ((~told | (copy != truth)).cumsum(dim=1) == 0)
    failed = (told & ~right).any(dim=1)
    tried = right.sum(dim=1) + failed
    seen = torch.stack([failed, tables.chances[last[:, _LENGTH]] * tried], dim=1)
    tables.record[rows.requests] = torch.where((tried > 0)[:, None], record * FADE + seen, record)
    tables.counts[2] += torch.where(last[:, _PROPOSED_BY] == COPIED, right.sum(dim=1), 0).sum()


def _text(rows: CopyRows, tables: CopyTables, places: Tensor) -> Tensor:
    """Tokens [bs, n] int64 at the positions [bs, n] of each request, up to its last token. -1 outside of it."""
    prefix_lens = rows.prefix_lens[:, None]
    inside = places.clamp(min=0, max=tables.req_to_token.shape[1] - 1)
    text = tables.history[tables.req_to_token[rows.requests[:, None], inside].long()].long()
    text = torch.where(places == prefix_lens, rows.tokens[:, :1], text)
    return torch.where((places >= 0) & (places <= prefix_lens), text, -1)


def find_copies_triton(rows: CopyRows, tables: CopyTables, on: Tensor) -> None:
    """`find_copies` as one Triton launch, programs of each request take chunks of its text in turn."""
    bs, chunks = len(rows.tokens), triton.cdiv(tables.req_to_token.shape[1], _CHUNK)
    _find_copies_kernel[(bs, _programs(bs, chunks))](
        on, rows.tokens, rows.prefix_lens, rows.requests, tables.req_to_token, tables.history, tables.matches,
        rows.tokens.stride(0), tables.req_to_token.stride(0), CHUNK=_CHUNK, LONGEST=LONGEST, AT_ONCE=_AT_ONCE,
    )  # fmt: skip


def _programs(requests: int, chunks: int) -> int:
    """Of each request: all together fill a GPU, and few have nothing to do."""
    return min(chunks, max(16, min(2048 // requests, 128)))


@triton.jit(do_not_specialize=["token_stride"])
def _find_copies_kernel(
    on_ptr, tokens_ptr, prefix_ptr, requests_ptr, req_to_token_ptr, history_ptr, matches_ptr,
    token_stride, row_stride,
    CHUNK: tl.constexpr, LONGEST: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    prefix = tl.load(prefix_ptr + request).to(tl.int64)
    end = tl.where(tl.load(on_ptr) > 0, prefix, 0)
    first = tl.program_id(1).to(tl.int64) * CHUNK
    while first < end:
        row_ptr = req_to_token_ptr + tl.load(requests_ptr + request).to(tl.int64) * row_stride
        place = first + tl.arange(0, CHUNK)
        own = tl.load(tokens_ptr + request * token_stride).to(tl.int32)
        alive = (place < prefix) & (own >= 0)
        slot = tl.load(row_ptr + place, mask=alive, other=0).to(tl.int64)
        alive = alive & (tl.load(history_ptr + slot, mask=alive, other=-1) == own)
        length = alive.to(tl.int64)
        lane = tl.arange(0, AT_ONCE)
        back = 1
        while (back < LONGEST) & (tl.max(alive.to(tl.int32), axis=0) > 0):
            behind = back + lane
            there = (behind <= prefix) & (behind < LONGEST)
            own_slots = tl.load(row_ptr + prefix - behind, mask=there, other=0).to(tl.int64)
            suffix = tl.load(history_ptr + own_slots, mask=there, other=-1)
            before = place[:, None] - behind[None, :]
            seen = alive[:, None] & (before >= 0) & (suffix >= 0)[None, :]
            slots = tl.load(row_ptr + before, mask=seen, other=0).to(tl.int64)
            same = seen & (tl.load(history_ptr + slots, mask=seen, other=-1) == suffix[None, :])
            run = tl.min(tl.where(same, AT_ONCE, lane[None, :]), axis=1)
            length += tl.where(alive, run, 0)
            alive = alive & (run == AT_ONCE)
            back += AT_ONCE
        key = tl.max(tl.where(length > 0, (length << 32) | (place + 1), 0), axis=0)
        if key > 0:
            tl.atomic_max(matches_ptr + request, key)
        first += tl.num_programs(1) * CHUNK


def write_copies_triton(rows: CopyRows, tables: CopyTables, on: Tensor) -> None:
    """`write_copies` as one Triton launch, one program per request."""
    tokens, slots, prefix_lens, requests, drawn, logprobs, best = rows
    (bs, block), most = tokens.shape, tables.last.shape[1] - _TOKENS
    _write_copies_kernel[(bs,)](
        on, tokens, slots, prefix_lens, requests, *(drawn or (None, None)), logprobs, *(best or (None, None)),
        *tables, tokens.stride(0), tables.req_to_token.stride(0), tables.last.stride(0),
        1 if logprobs is None else logprobs.stride(1),
        STEPS=block - 1, MOST=most, LANES=triton.next_power_of_2(most + 1),
        DRAWN=0 if drawn is None else drawn.ids.shape[2], BEST=0 if best is None else best.ids.shape[2],
        LEAST=LEAST, GAIN=GAIN, FADE=FADE, FIRST_FAILED=FIRST_FAILED, FIRST_EXPECTED=FIRST_EXPECTED, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["token_stride"])
def _write_copies_kernel(
    on_ptr, tokens_ptr, slots_ptr, prefix_ptr, requests_ptr,
    drawn_ptr, probs_ptr, logprobs_ptr, best_ptr, best_logprobs_ptr,
    history_ptr, req_to_token_ptr, matches_ptr, record_ptr, last_ptr, chances_ptr, counts_ptr, promised_ptr,
    token_stride, row_stride, last_stride, logprob_stride,
    STEPS: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr, DRAWN: tl.constexpr, BEST: tl.constexpr,
    LEAST: tl.constexpr, GAIN: tl.constexpr, FADE: tl.constexpr,
    FIRST_FAILED: tl.constexpr, FIRST_EXPECTED: tl.constexpr,
):  # fmt: skip
    if tl.load(on_ptr) == 0:
        return
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    row = tl.load(requests_ptr + request).to(tl.int64)
    prefix = tl.load(prefix_ptr + request).to(tl.int64)
    row_ptr = req_to_token_ptr + row * row_stride
    anchor = tl.load(tokens_ptr + request * token_stride).to(tl.int64)

    # What the step before has shown.
    last = last_ptr + row * last_stride
    record = record_ptr + row * 2
    failed_sum, expected = tl.load(record), tl.load(record + 1)
    proposed_by, last_prefix, last_length = tl.load(last), tl.load(last + 1), tl.load(last + 2)
    committed = prefix - last_prefix
    live = (proposed_by > 0) & (committed > 0)
    copy = tl.load(last + 4 + lane, mask=lane < MOST, other=-1)
    told = live & (lane < committed) & (lane < tl.load(last + 3)) & (copy >= 0)
    place = last_prefix + 1 + lane
    slot = tl.load(row_ptr + place, mask=told & (place < prefix), other=0).to(tl.int64)
    truth = tl.load(history_ptr + slot, mask=told & (place < prefix), other=-1).to(tl.int64)
    truth = tl.where(place == prefix, anchor, truth)
    end = tl.min(tl.where(told & (copy == truth), LANES, lane), axis=0)  # of the run that came true
    failed = tl.sum((told & (lane == end)).to(tl.int32), axis=0)
    tried = end + failed
    if tried > 0:
        failed_sum = failed_sum * FADE + failed.to(tl.float32)
        expected = expected * FADE + tl.load(chances_ptr + last_length) * tried.to(tl.float32)
    if (proposed_by == 2) & (end > 0):
        tl.atomic_add(counts_ptr + 2, end.to(tl.int64))
    tl.store(record, failed_sum)
    tl.store(record + 1, expected)

    # The copy, and whether it promises enough.
    key = tl.load(matches_ptr + request)
    tl.store(matches_ptr + request, tl.zeros((), tl.int64))
    length, after = key >> 32, key & 0xFFFFFFFF
    length = tl.where(length >= LEAST, length, 0)
    there = (length > 0) & (lane < MOST)
    place = after + lane % tl.maximum(prefix + 1 - after, 1)
    slot = tl.load(row_ptr + place, mask=there & (place < prefix), other=0).to(tl.int64)
    copy = tl.load(history_ptr + slot, mask=there & (place < prefix), other=-1).to(tl.int64)
    copy = tl.where(there & (place == prefix), anchor, copy)
    end = tl.min(tl.where(copy < 0, lane, LANES), axis=0)
    copy = tl.where(lane < end, copy, -1)
    level = (failed_sum + FIRST_FAILED) / (expected + FIRST_EXPECTED)
    right = 1.0 - tl.minimum(tl.load(chances_ptr + length) * level, 1.0)
    power, promised = right * 0.0 + 1.0, right * 0.0 + 1.0
    for _ in range(STEPS):
        power *= right
        promised += power
    at = request * STEPS + lane
    copied = (copy >= 0) & (lane < STEPS)
    if STEPS > 0:
        logprobs = tl.load(logprobs_ptr + at * logprob_stride, mask=lane < STEPS, other=float("-inf"))
        drafted = 1.0 + tl.sum(tl.exp(tl.cumsum(logprobs, axis=0)), axis=0)
        copied = tl.where(promised >= GAIN * drafted, copied, False)
    count = tl.sum(copied.to(tl.int64), axis=0)

    own = tokens_ptr + request * token_stride + lane
    proposal = tl.load(own + 1, mask=lane < STEPS, other=0).to(tl.int64)
    proposal = tl.where(copied, copy, proposal)
    tl.store(own + 1, proposal, mask=copied)
    slots = slots_ptr + request * (STEPS + 1)
    tl.store(history_ptr + tl.load(slots), anchor.to(tl.int32))
    slot = tl.load(slots + 1 + lane, mask=lane < STEPS, other=0)
    tl.store(history_ptr + slot, proposal.to(tl.int32), mask=lane < STEPS)
    log_right = tl.log(right)
    if STEPS > 0:
        tl.store(logprobs_ptr + at * logprob_stride, log_right + tl.zeros((LANES,), tl.float32), mask=copied)
    if DRAWN > 0:
        _make_certain(drawn_ptr, probs_ptr, at, copy, copied, 1.0, 0.0, DRAWN)
    if BEST > 0:
        _make_certain(best_ptr, best_logprobs_ptr, at, copy, copied, log_right, float("-inf"), BEST)

    kind = tl.where(count > 0, 2, 1) if STEPS > 0 else 0
    tl.store(last, tl.zeros((), tl.int64) + kind)
    tl.store(last + 1, prefix)
    tl.store(last + 2, length)
    tl.store(last + 3, tl.full((), STEPS, tl.int64))
    tl.store(last + 4 + lane, copy, mask=lane < MOST)
    tl.store(promised_ptr + request, tl.where((count > 0) & (STEPS > 0), right, 0.0))
    if count > 0:
        tl.atomic_add(counts_ptr, tl.full((), 1, tl.int64))
        tl.atomic_add(counts_ptr + 1, count)
        tl.atomic_add(counts_ptr + 3, length)


@triton.jit
def _make_certain(ids_ptr, values_ptr, at, copy, copied, certain, never, COUNT: tl.constexpr):
    """The copy becomes the first candidate, and the first one takes its place: candidates are distinct."""
    none = tl.zeros_like(copy).to(tl.float32)
    first = tl.load(ids_ptr + at * COUNT, mask=copied, other=0)
    tl.store(ids_ptr + at * COUNT, copy, mask=copied)
    tl.store(values_ptr + at * COUNT, none + certain, mask=copied)
    for rank in range(1, COUNT):
        candidate = tl.load(ids_ptr + at * COUNT + rank, mask=copied, other=0)
        tl.store(ids_ptr + at * COUNT + rank, first, mask=copied & (candidate == copy))
        tl.store(values_ptr + at * COUNT + rank, none + never, mask=copied)


def extend_copies_triton(rows: CopyRows, tables: CopyTables, length: int) -> Rows:
    """`extend_copies` as one Triton launch, one program per request."""
    (bs, block), like = rows.tokens.shape, dict(dtype=torch.int64, device=rows.tokens.device)
    chains = Rows(*(torch.empty((bs, length), **like) for _ in Rows._fields))
    _extend_copies_kernel[(bs,)](
        rows.tokens, rows.prefix_lens, rows.requests, tables.req_to_token, tables.history, tables.last,
        tables.counts, *chains, rows.tokens.stride(0), tables.req_to_token.stride(0), tables.last.stride(0),
        BLOCK=block, LENGTH=length, LANES=triton.next_power_of_2(length), num_warps=1,
    )  # fmt: skip
    return chains


@triton.jit(do_not_specialize=["token_stride"])
def _extend_copies_kernel(
    tokens_ptr, prefix_ptr, requests_ptr, req_to_token_ptr, history_ptr, last_ptr, counts_ptr,
    ids_ptr, positions_ptr, slots_ptr, token_stride, row_stride, last_stride,
    BLOCK: tl.constexpr, LENGTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    there, behind = lane < LENGTH, (lane >= BLOCK) & (lane < LENGTH)
    row = tl.load(requests_ptr + request).to(tl.int64)
    last = last_ptr + row * last_stride
    copying = tl.load(last) == 2
    copy = tl.load(last + 4 + lane - 1, mask=behind & copying, other=-1)
    token = tl.load(tokens_ptr + request * token_stride + lane, mask=lane < BLOCK, other=0)
    token = tl.where(behind, tl.maximum(copy, 0), token)
    position = tl.load(prefix_ptr + request).to(tl.int64) + lane
    slot = tl.load(req_to_token_ptr + row * row_stride + position, mask=there, other=0).to(tl.int64)
    tl.store(history_ptr + slot, token.to(tl.int32), mask=there)
    out = request * LENGTH + lane
    tl.store(ids_ptr + out, token, mask=there)
    tl.store(positions_ptr + out, position, mask=there)
    tl.store(slots_ptr + out, slot, mask=there)
    tl.store(last + 3, tl.where(copying, LENGTH - 1, BLOCK - 1).to(tl.int64))
    tl.atomic_add(counts_ptr + 4, tl.sum((copy >= 0).to(tl.int64), axis=0))
