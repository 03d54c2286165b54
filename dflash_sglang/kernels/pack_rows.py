"""Rows of blocks of which each request verifies its first ones: packed request after request, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PADDING_LANES = 256


class Rows(NamedTuple):
    """Ids, positions and slots of rows: [bs, block] of whole blocks, [rows] packed. int64."""

    ids: Tensor
    positions: Tensor
    slots: Tensor


def pack_rows(blocks: Rows, starts: Tensor, lens: Tensor, out: Rows) -> None:
    """Row i of request b becomes row `starts[b] + i` of `out`, for i below `lens[b]`.

    starts [bs + 1], the last one the number of rows; lens [bs]. Rows of `out` beyond them pad a graph: they are 0,
    and so is their slot, which is nobody's.
    """
    launch = pack_rows_triton if blocks.ids.is_cuda else pack_rows_torch
    launch(blocks, starts, lens, out)


def pack_rows_torch(blocks: Rows, starts: Tensor, lens: Tensor, out: Rows) -> None:
    """The definition of `pack_rows` in torch operations."""
    verified = torch.arange(blocks.ids.shape[1], device=lens.device) < lens[:, None]
    for rows, packed in zip(blocks, out, strict=True):
        packed.zero_()
        packed[: int(starts[-1])] = rows[verified]


def pack_rows_triton(blocks: Rows, starts: Tensor, lens: Tensor, out: Rows) -> None:
    """`pack_rows` as one Triton launch, one program per request and one for the padding."""
    bs, block = blocks.ids.shape
    _pack_rows_kernel[(bs + 1,)](
        *blocks,
        starts,
        lens,
        *out,
        bs,
        len(out.ids),
        BLOCK=block,
        LANES=triton.next_power_of_2(block),
        PADDING_LANES=_PADDING_LANES,
    )


@triton.jit(do_not_specialize=["bs", "rows"])
def _pack_rows_kernel(
    ids_ptr, positions_ptr, slots_ptr, starts_ptr, lens_ptr, out_ids_ptr, out_positions_ptr, out_slots_ptr,
    bs, rows,
    BLOCK: tl.constexpr, LANES: tl.constexpr, PADDING_LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    start = tl.load(starts_ptr + request).to(tl.int64)
    if request < bs:
        lane = tl.arange(0, LANES)
        verified = lane < tl.load(lens_ptr + request)
        source, to = request * BLOCK + lane, start + lane
        tl.store(out_ids_ptr + to, tl.load(ids_ptr + source, mask=verified), mask=verified)
        tl.store(out_positions_ptr + to, tl.load(positions_ptr + source, mask=verified), mask=verified)
        tl.store(out_slots_ptr + to, tl.load(slots_ptr + source, mask=verified), mask=verified)
    else:
        nothing = tl.zeros((PADDING_LANES,), tl.int64)
        for first in range(start, rows, PADDING_LANES):
            row = first + tl.arange(0, PADDING_LANES)
            tl.store(out_ids_ptr + row, nothing, mask=row < rows)
            tl.store(out_positions_ptr + row, nothing, mask=row < rows)
            tl.store(out_slots_ptr + row, nothing, mask=row < rows)
