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

    def left_out(self, prefix_lens: Any) -> Any:
        """Context tokens between sinks and window, of requests with so many. Tensors or arrays of integers."""
        begin = (prefix_lens - self.window).clip(min=0) // self.page_size * self.page_size
        return (begin - self.sinks).clip(min=0)

    def widest(self, block: int) -> int:
        """Columns of the longest row, the block's included."""
        return self.sinks + self.window + self.page_size - 1 + block


class WindowRows(NamedTuple):
    """What `window_rows` fills."""

    draft_table: Tensor  # [max_requests, row_width] int32 slots, the rows of the batch
    prefix_lens: Tensor  # [bs] context tokens in each row


def window_rows(
    req_to_token: Tensor,  # [max_requests, row_width] int32 slots
    req_pool_indices: Tensor,  # [bs] row of both tables
    prefix_lens: Tensor,  # [bs] int64 context tokens of each request
    block: int,
    span: Span,
    out: WindowRows,
) -> None:
    """Write the slots that each request's draft block reads, in order: sinks, window, block."""
    launch = window_rows_triton if prefix_lens.is_cuda else window_rows_torch
    launch(req_to_token, req_pool_indices, prefix_lens, block, span, out)


def window_rows_torch(
    req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor, block: int, span: Span, out: WindowRows
) -> None:
    """The definition of `window_rows` in torch operations."""
    left_out = span.left_out(prefix_lens)
    torch.sub(prefix_lens, left_out, out=out.prefix_lens)
    width = min(span.widest(block), req_to_token.shape[1])
    columns = torch.arange(width, device=prefix_lens.device)
    source = columns + (columns >= span.sinks) * left_out[:, None]
    rows = req_pool_indices.long()[:, None].expand_as(source)
    live = columns < out.prefix_lens[:, None] + block
    out.draft_table[rows[live], columns.expand_as(source)[live]] = req_to_token[rows[live], source[live]]


def window_rows_triton(
    req_to_token: Tensor, req_pool_indices: Tensor, prefix_lens: Tensor, block: int, span: Span, out: WindowRows
) -> None:
    """`window_rows` as one Triton launch."""
    width = min(span.widest(block), req_to_token.shape[1])
    _window_rows_kernel[(prefix_lens.shape[0], triton.cdiv(width, LANES))](
        req_to_token, req_pool_indices, prefix_lens, *out, req_to_token.stride(0), out.draft_table.stride(0),
        WINDOW=span.window, SINKS=span.sinks, PAGE=span.page_size, BLOCK=block, LANES=LANES,
    )  # fmt: skip


@triton.jit
def _window_rows_kernel(
    table_ptr, req_ptr, prefix_ptr, draft_table_ptr, draft_prefix_ptr, row_stride, draft_row_stride,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    prefix = tl.load(prefix_ptr + request).to(tl.int64)
    begin = tl.maximum(prefix - WINDOW, 0) // PAGE * PAGE
    left_out = tl.maximum(begin - SINKS, 0)
    seen = prefix - left_out
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    live = column < seen + BLOCK
    source = column + tl.where(column >= SINKS, left_out, 0)
    row = tl.load(req_ptr + request).to(tl.int64)
    slot = tl.load(table_ptr + row * row_stride + source, mask=live, other=0)
    tl.store(draft_table_ptr + row * draft_row_stride + column, slot, mask=live)
    if tl.program_id(1) == 0:
        tl.store(draft_prefix_ptr + request, seen)
