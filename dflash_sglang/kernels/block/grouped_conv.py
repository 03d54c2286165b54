"""Grouped dynamic convolution over the rows of a block (DFlash2): a Triton kernel beside its torch twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024


def grouped_conv(
    rows: torch.Tensor,  # [T, hidden], T a multiple of block_size, channels contiguous
    dynamic: torch.Tensor,  # [T, taps, groups], the last two dimensions contiguous
    base: torch.Tensor,  # [taps, hidden], contiguous
    block_size: int,
) -> torch.Tensor:
    """[T, hidden]: every channel c of row t becomes the sum over the taps of

        (base[tap, c] + dynamic[t, tap, group of c]) * rows[t - tap, c]

    Tap 0 is the row itself. A tap that reaches before the first row of its block reads zero: blocks are
    independent, and the first row of a block sees itself alone. Channels fall into groups of hidden / groups
    neighbours. Sums are taken in float32 and rounded to the dtype of `rows` once.
    """
    if rows.shape[0] == 0:
        return torch.empty_like(rows)
    return (grouped_conv_triton if rows.is_cuda else grouped_conv_torch)(rows, dynamic, base, block_size)


def grouped_conv_torch(
    rows: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, block_size: int
) -> torch.Tensor:
    """The definition of `grouped_conv` in torch operations."""
    total, taps, groups = dynamic.shape
    blocks = rows.float().view(-1, block_size, rows.shape[1])
    spread = dynamic.float().repeat_interleave(rows.shape[1] // groups, dim=-1)
    coefficients = (base.float() + spread).view(-1, block_size, taps, rows.shape[1])
    out = torch.zeros_like(blocks)
    for tap in range(min(taps, block_size)):
        out[:, tap:] += coefficients[:, tap:, tap] * blocks[:, : block_size - tap]
    return out.view(total, -1).to(rows.dtype)


def grouped_conv_triton(
    rows: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, block_size: int
) -> torch.Tensor:
    """`grouped_conv` as one Triton launch, one program per row and tile of channels."""
    total, hidden = rows.shape
    _, taps, groups = dynamic.shape
    out = torch.empty((total, hidden), dtype=rows.dtype, device=rows.device)
    tile = min(TILE, triton.next_power_of_2(hidden))
    _grouped_conv_kernel[(total, triton.cdiv(hidden, tile))](
        rows, dynamic, base, out, rows.stride(0), dynamic.stride(0), hidden, block_size,
        GROUPS=groups, GROUP_SIZE=hidden // groups, TAPS=taps, TILE=tile,
    )  # fmt: skip
    return out


@triton.jit
def _grouped_conv_kernel(
    rows_ptr, dynamic_ptr, base_ptr, out_ptr, row_stride, dynamic_stride, hidden, block_size,
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = row % block_size
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = channel < hidden
    group = channel // GROUP_SIZE
    total = tl.zeros((TILE,), tl.float32)
    for tap in tl.static_range(TAPS):
        seen = live & (tap <= place)
        value = tl.load(rows_ptr + (row - tap) * row_stride + channel, mask=seen, other=0.0)
        base = tl.load(base_ptr + tap * hidden + channel, mask=seen, other=0.0)
        dynamic = tl.load(dynamic_ptr + row * dynamic_stride + tap * GROUPS + group, mask=seen, other=0.0)
        total += (base.to(tl.float32) + dynamic.to(tl.float32)) * value.to(tl.float32)
    tl.store(out_ptr + row * hidden + channel, total.to(out_ptr.dtype.element_ty), mask=live)
