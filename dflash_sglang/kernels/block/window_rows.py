"""Rows of a draft's own slot table in one launch: first tokens, latest tokens and the block of every request."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 1024  # columns of one program


class Span(NamedTuple):
    """Which context tokens a draft sees: the first `sinks` and the last `window`.

    Whole pages: `sinks` is a multiple of `page_size`, and the window begins with a page, up to
    page_size - 1 tokens early.
    """

    window: int
    sinks: int
    page_size: int

    def left_out(self, prefix_lens: Any, low: Any = 0) -> Any:
        """Context tokens between sinks and window, of requests with so many; none before position `low` is in the
        window. Tensors or arrays of integers."""
        begin = (prefix_lens - self.window).clip(min=low).clip(max=prefix_lens)
        return (begin // self.page_size * self.page_size - self.sinks).clip(min=0)

    def widest(self, block: int) -> int:
        """Columns of the longest row, the block's included."""
        return self.sinks + self.window + self.page_size - 1 + block


class RingSlots(NamedTuple):
    """Slots of requests that have a ring each: position p is in `page_size + ring * size + p % size`."""

    ring_of_row: Tensor  # [max_requests] int64
    low: Tensor  # [max_requests] int64, the first position that is in the row's ring
    size: int


class WindowRows(NamedTuple):
    """What `window_rows` fills."""

    draft_table: Tensor  # [max_requests, row_width] int32 slots, the rows of the batch
    prefix_lens: Tensor  # [bs] context tokens in each row


def window_rows(
    source: Tensor | RingSlots,  # of the slots: req_to_token [max_requests, row_width] int32, or rings
    rows: Tensor,  # [bs] of the source and of the draft's table
    prefix_lens: Tensor,  # [bs] int64 context tokens of each request
    block: int,
    span: Span,
    out: WindowRows,
) -> None:
    """Write the slots that each request's draft block reads, in order: sinks, window, block."""
    launch = window_rows_triton if prefix_lens.is_cuda else window_rows_torch
    launch(source, rows, prefix_lens, block, span, out)


def window_rows_torch(
    source: Tensor | RingSlots, rows: Tensor, prefix_lens: Tensor, block: int, span: Span, out: WindowRows
) -> None:
    """The definition of `window_rows` in torch operations."""
    rows = rows.long()
    left_out = span.left_out(prefix_lens, source.low[rows] if isinstance(source, RingSlots) else 0)
    torch.sub(prefix_lens, left_out, out=out.prefix_lens)
    columns = torch.arange(min(span.widest(block), out.draft_table.shape[1]), device=prefix_lens.device)
    request, column = (columns < out.prefix_lens[:, None] + block).nonzero(as_tuple=True)
    rows, position = rows[request], column + (column >= span.sinks) * left_out[request]
    if isinstance(source, RingSlots):
        slots = span.page_size + source.ring_of_row[rows] * source.size + position % source.size
    else:
        slots = source[rows, position]
    out.draft_table[rows, column] = slots.int()


def window_rows_triton(
    source: Tensor | RingSlots, rows: Tensor, prefix_lens: Tensor, block: int, span: Span, out: WindowRows
) -> None:
    """`window_rows` as one Triton launch."""
    width = min(span.widest(block), out.draft_table.shape[1])
    slots, low, size = source if isinstance(source, RingSlots) else (source, source, 0)
    _window_rows_kernel[(prefix_lens.shape[0], triton.cdiv(width, LANES))](
        slots, low, rows, prefix_lens, *out, slots.stride(0), out.draft_table.stride(0),
        WINDOW=span.window, SINKS=span.sinks, PAGE=span.page_size, BLOCK=block, LANES=LANES, RING=size,
    )  # fmt: skip


@triton.jit
def _window_rows_kernel(
    slots_ptr, low_ptr, rows_ptr, prefix_ptr, draft_table_ptr, draft_prefix_ptr, row_stride, draft_row_stride,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(rows_ptr + request).to(tl.int64)
    prefix = tl.load(prefix_ptr + request).to(tl.int64)
    begin = tl.maximum(prefix - WINDOW, 0)
    if RING > 0:
        begin = tl.minimum(tl.maximum(begin, tl.load(low_ptr + row)), prefix)
    left_out = tl.maximum(begin // PAGE * PAGE - SINKS, 0)
    seen = prefix - left_out
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    live = column < seen + BLOCK
    position = column + tl.where(column >= SINKS, left_out, 0)
    if RING > 0:
        slot = PAGE + tl.load(slots_ptr + row) * RING + position % RING
    else:
        slot = tl.load(slots_ptr + row * row_stride + position, mask=live, other=0)
    tl.store(draft_table_ptr + row * draft_row_stride + column, slot.to(tl.int32), mask=live)
    if tl.program_id(1) == 0:
        tl.store(draft_prefix_ptr + request, seen)
