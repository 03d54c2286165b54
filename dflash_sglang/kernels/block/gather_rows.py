"""Rows of an embedding table by their ids: torch's kernel for few rows is one of the draft graph's slowest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 1024


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table [tokens, hidden] of any dtype, the elements of a row next to each other; ids [N] integers, all of them
    rows of the table, which is not checked on a GPU -> [N, hidden]."""
    return (gather_rows_triton if table.is_cuda else gather_rows_torch)(table, ids)


def gather_rows_torch(table: Tensor, ids: Tensor) -> Tensor:
    """The definition of `gather_rows` in torch operations."""
    return torch.nn.functional.embedding(ids, table)


def gather_rows_triton(table: Tensor, ids: Tensor) -> Tensor:
    """`gather_rows` as one Triton launch, one program per row and slice of it; none without rows."""
    hidden = table.shape[1]
    out = table.new_empty((len(ids), hidden))
    if len(ids):
        grid = (len(ids), triton.cdiv(hidden, _LANES))
        _gather_rows_kernel[grid](table, ids, out, table.stride(0), HIDDEN=hidden, LANES=_LANES)
    return out


# Parts of ids begin anywhere: specialised alignment would compile the kernel anew in the middle of serving.
@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _gather_rows_kernel(table_ptr, ids_ptr, out_ptr, row_stride, HIDDEN: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = lane < HIDDEN
    source = table_ptr + tl.load(ids_ptr + row).to(tl.int64) * row_stride + lane
    tl.store(out_ptr + row * HIDDEN + lane, tl.load(source, mask=inside), mask=inside)
