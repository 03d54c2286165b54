"""Rows of blocks of which each request verifies its first ones: packed request after request, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Rows(NamedTuple):
    """Ids, positions and slots of rows, int64: [bs, block] of whole blocks, or [rows] one after the other."""

    ids: Tensor
    positions: Tensor
    slots: Tensor


def pack_rows(blocks: Rows, starts: Tensor, lens: Tensor, out: Rows) -> None:
    """Row i of request b becomes row `starts[b] + i` of `out`, for i below `lens[b]`. starts, lens: [bs]."""
    launch = pack_rows_triton if blocks.ids.is_cuda else pack_rows_torch
    launch(blocks, starts, lens, out)


def pack_rows_torch(blocks: Rows, starts: Tensor, lens: Tensor, out: Rows) -> None:
    """The definition of `pack_rows` in torch operations."""
    lane = torch.arange(blocks.ids.shape[1], device=lens.device)
    verified = lane < lens[:, None]
    to = (starts[:, None] + lane)[verified]
    for rows, packed in zip(blocks, out, strict=True):
        packed[to] = rows[verified]


def pack_rows_triton(blocks: Rows, starts: Tensor, lens: Tensor, out: Rows) -> None:
    """`pack_rows` as one Triton launch, one program per request."""
    bs, block = blocks.ids.shape
    _pack_rows_kernel[(bs,)](*blocks, starts, lens, *out, BLOCK=block, LANES=triton.next_power_of_2(block))


@triton.jit
def _pack_rows_kernel(
    ids_ptr, positions_ptr, slots_ptr, starts_ptr, lens_ptr, out_ids_ptr, out_positions_ptr, out_slots_ptr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    verified = lane < tl.load(lens_ptr + request)
    source, to = request * BLOCK + lane, tl.load(starts_ptr + request).to(tl.int64) + lane
    tl.store(out_ids_ptr + to, tl.load(ids_ptr + source, mask=verified), mask=verified)
    tl.store(out_positions_ptr + to, tl.load(positions_ptr + source, mask=verified), mask=verified)
    tl.store(out_slots_ptr + to, tl.load(slots_ptr + source, mask=verified), mask=verified)
