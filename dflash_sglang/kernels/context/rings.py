"""The draft's keys and values in rings: where tokens go, and what a new request takes over."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, arange, where

from dflash_sglang.kernels.block.window_rows import RingSlots, Span

LANES = 1024  # tokens of one program
FEWEST_TAILS = 16
SLOT = (1 << 32) - 1  # the bits of a tag that hold a draft slot; the step that wrote it is above them


class RingShape(NamedTuple):
    """A ring of `size` slots keeps the draft's rows of a request's latest tokens.

    The token at position p has the draft slot `page_size + ring * size + p % size`; the first page is padding. A
    block sees the last `window` tokens, from the beginning of a page.
    """

    window: int
    page_size: int
    size: int  # whole pages

    @classmethod
    def fitting(cls, window: int, page_size: int, block: int, nodes: int = 0) -> RingShape:
        """The smallest ring that still holds a window when its request ends.

        A step that was in flight then has written a block, or the `nodes` of a tree, after another block. A prefix
        hit and a window begin with a page.
        """
        needed = window + block + max(block, nodes) + 2 * (page_size - 1)
        return cls(window, page_size, -(-needed // page_size) * page_size)

    @property
    def span(self) -> Span:
        """What a block sees."""
        return Span(self.window, 0, self.page_size)

    @property
    def context(self) -> int:
        """Tokens before a block that the block may read."""
        return self.span.widest(0)

    @staticmethod
    def rings(requests: int) -> int:
        """For so many running requests, and for the tails of finished ones."""
        return requests + max(FEWEST_TAILS, requests // 4)


class RingTables(NamedTuple):
    """What is where. A tag names a write: the number of its step, and the draft slot (`SLOT`)."""

    shape: RingShape
    ring_of_row: Tensor  # [rows] int64, by row of req_to_token
    low: Tensor  # [rows] int64, first position whose keys and values are in the row's ring, where a page begins
    tags: Tensor  # [rings, size] int64, -1: nothing
    latest: Tensor  # [target slots] int64, tag of the latest write of the token in each; 0: none
    scores: Tensor  # [rings] int64: scratch

    @property
    def slots(self) -> RingSlots:
        return RingSlots(self.ring_of_row, self.low, self.shape.size)


class Moves(NamedTuple):
    """Draft slots [context] int64 that are copied, 0 to 0 where there is nothing to copy."""

    targets: Tensor
    sources: Tensor


def assign_slots(
    rows: Tensor,  # [n] rows of req_to_token
    firsts: Tensor,  # [n] int64 position of the first of each one's tokens
    slots: Tensor,  # [n, tokens] int64 target slots, contiguous; 0: a token of nobody
    step: int,
    tables: RingTables,
    out: Tensor,  # [n, tokens] int64 draft slots, contiguous
) -> None:
    """Give tokens their draft slots, and note that step `step` writes them."""
    launch = assign_slots_triton if slots.is_cuda else assign_slots_torch
    launch(rows, firsts, slots, step, tables, out)


def assign_slots_torch(
    rows: Tensor, firsts: Tensor, slots: Tensor, step: int, tables: RingTables, out: Tensor
) -> None:
    """The definition of `assign_slots` in torch operations."""
    shape = tables.shape
    entries = (firsts[:, None] + arange(slots.shape[1], device=slots.device)) % shape.size
    rings = tables.ring_of_row[rows.long()][:, None].expand_as(entries)
    out.copy_(shape.page_size + rings * shape.size + entries)
    tags = out | step << 32
    tables.tags[rings, entries] = tags
    live = slots > 0
    tables.latest[slots[live]] = tags[live]


def assign_slots_triton(
    rows: Tensor, firsts: Tensor, slots: Tensor, step: int, tables: RingTables, out: Tensor
) -> None:
    """`assign_slots` as one Triton launch."""
    requests, tokens = slots.shape
    lanes = 128
    _assign_slots_kernel[(triton.cdiv(requests * tokens, lanes),)](
        rows, firsts, slots, tables.ring_of_row, tables.tags, tables.latest, out, requests * tokens, tokens, step,
        SIZE=tables.shape.size, PAGE=tables.shape.page_size, LANES=lanes,
    )  # fmt: skip


# Specialised values would compile the kernel anew in the middle of serving.
@triton.jit(do_not_specialize=["count", "tokens", "step"])
def _assign_slots_kernel(
    rows_ptr, firsts_ptr, slots_ptr, rings_ptr, tags_ptr, latest_ptr, out_ptr, count, tokens, step,
    SIZE: tl.constexpr, PAGE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = lane < count
    request = lane // tokens
    row = tl.load(rows_ptr + request, mask=live, other=0).to(tl.int64)
    position = tl.load(firsts_ptr + request, mask=live, other=0).to(tl.int64) + lane % tokens
    place = tl.load(rings_ptr + row, mask=live, other=0) * SIZE + position % SIZE
    tag = (PAGE + place) | (tl.full((LANES,), 0, tl.int64) + step << 32)
    slot = tl.load(slots_ptr + lane, mask=live, other=0)
    tl.store(out_ptr + lane, PAGE + place, mask=live)
    tl.store(tags_ptr + place, tag, mask=live)
    tl.store(latest_ptr + slot, tag, mask=live & (slot > 0))


def take_over(row: int, hit: int, req_to_token: Tensor, tables: RingTables, out: Moves) -> None:
    """Prepare a ring for a request whose first `hit` tokens need no prefill.

    Of all rings, the one that has the most of the tokens before `hit` is copied from; the row's own ring needs no
    copy. A ring has a token if it has the latest write of the token's target slot. Sets `low` and tags of the row,
    and `out`, which the pool has yet to copy.

    req_to_token [rows, row_width] int32.
    """
    launch = take_over_triton if req_to_token.is_cuda else take_over_torch
    launch(row, hit, req_to_token, tables, out)


def take_over_torch(row: int, hit: int, req_to_token: Tensor, tables: RingTables, out: Moves) -> None:
    """The definition of `take_over` in torch operations."""
    shape, scores, rings, page = tables.shape, tables.scores, len(tables.tags), tables.shape.page_size
    back = arange(shape.context, device=scores.device)
    positions = (hit - 1 - back).clamp(min=0)
    entries = positions % shape.size
    same = tables.tags[:, entries] == tables.latest[req_to_token[row, positions].long()]
    found = (same & (back < hit)).int().cumprod(1).sum(1)
    number, own = arange(rings, device=scores.device), tables.ring_of_row[row]
    scores.copy_((found * 2 + (number == own)) * rings + number)
    best = scores.max()
    source, most = best % rings, best // rings // 2
    moved = (back < most) & (source != own)
    tables.tags[own, entries] = where(moved, tables.tags[source, entries], tables.tags[own, entries])
    tables.low[row] = ((hit - most + page - 1) // page * page).clamp(max=hit)
    out.targets.copy_(where(moved, page + own * shape.size + entries, 0))
    out.sources.copy_(where(moved, page + source * shape.size + entries, 0))


def take_over_triton(row: int, hit: int, req_to_token: Tensor, tables: RingTables, out: Moves) -> None:
    """`take_over` as two Triton launches."""
    shape, scores, rings = tables.shape, tables.scores, len(tables.tags)
    lanes = min(LANES, triton.next_power_of_2(shape.context))
    _score_rings_kernel[(rings,)](
        req_to_token, tables.ring_of_row, tables.tags, tables.latest, scores, req_to_token.stride(0), row, hit,
        rings, SIZE=shape.size, CONTEXT=shape.context, LANES=lanes,
    )  # fmt: skip
    _take_over_kernel[(triton.cdiv(shape.context, lanes),)](
        tables.ring_of_row, tables.low, tables.tags, scores, *out, row, hit, rings,
        SIZE=shape.size, PAGE=shape.page_size, CONTEXT=shape.context, LANES=lanes,
        RINGS=triton.next_power_of_2(rings),
    )  # fmt: skip


@triton.jit(do_not_specialize=["row", "hit", "rings"])
def _score_rings_kernel(
    table_ptr, rings_ptr, tags_ptr, latest_ptr, scores_ptr, table_stride, row, hit, rings,
    SIZE: tl.constexpr, CONTEXT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    ring = tl.program_id(0).to(tl.int64)
    table_ptr += tl.cast(row, tl.int64) * table_stride
    found = tl.minimum(CONTEXT, hit)
    for first in range(0, CONTEXT, LANES):
        back = first + tl.arange(0, LANES)
        live = back < found
        position = hit - 1 - back
        slot = tl.load(table_ptr + position, mask=live, other=0)
        tag = tl.load(tags_ptr + ring * SIZE + position % SIZE, mask=live, other=0)
        differs = live & (tag != tl.load(latest_ptr + slot, mask=live, other=0))
        found = tl.minimum(found, tl.min(tl.where(differs, back, CONTEXT), 0))
    own = (tl.load(rings_ptr + row) == ring).to(tl.int64)
    tl.store(scores_ptr + ring, (found.to(tl.int64) * 2 + own) * rings + ring)


@triton.jit(do_not_specialize=["row", "hit", "rings"])
def _take_over_kernel(
    rings_ptr, low_ptr, tags_ptr, scores_ptr, targets_ptr, sources_ptr, row, hit, rings,
    SIZE: tl.constexpr, PAGE: tl.constexpr, CONTEXT: tl.constexpr, LANES: tl.constexpr, RINGS: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, RINGS)
    best = tl.max(tl.load(scores_ptr + number, mask=number < rings, other=0), 0)
    source, most = best % rings, best // rings // 2
    own = tl.load(rings_ptr + row)
    back = tl.program_id(0) * LANES + tl.arange(0, LANES)
    moved = (back < most) & (source != own)
    entry = tl.where(moved, hit - 1 - back, 0) % SIZE
    tag = tl.load(tags_ptr + source * SIZE + entry, mask=moved, other=0)
    tl.store(tags_ptr + own * SIZE + entry, tag, mask=moved)
    tl.store(targets_ptr + back, tl.where(moved, PAGE + own * SIZE + entry, 0), mask=back < CONTEXT)
    tl.store(sources_ptr + back, tl.where(moved, PAGE + source * SIZE + entry, 0), mask=back < CONTEXT)
    if tl.program_id(0) == 0:
        tl.store(low_ptr + row, tl.minimum((hit - most + PAGE - 1) // PAGE * PAGE, hit))
