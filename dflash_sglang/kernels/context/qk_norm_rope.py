"""RMS norm and RoPE of a block's query and key heads, in place on their projection, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024  # elements of a program: 16 bytes per thread of each half of a head
_WARPS = 2


def qk_norm_rope_(
    qk: Tensor,  # [T, >= (q_heads + k_heads) * head_dim] bfloat16: query heads, key heads, then anything
    positions: Tensor,  # [T] integers, rows of cos_sin
    q_norm: Tensor,  # [head_dim] bfloat16
    k_norm: Tensor,  # [head_dim] bfloat16
    cos_sin: Tensor,  # [positions, head_dim] cosines, then sines, of the halves of a head
    q_heads: int,
    k_heads: int,
    head_dim: int,  # a power of 2
    eps: float,
) -> None:
    """Norm and rotate every query and key head in place, as one Triton launch; none without rows.

    Rows may be strided, their elements are next to each other. Roundings are those of SGLang's kernels, and so are
    the bits on a GPU: the keys of a block equal those that its kernel for all layers writes
    (`models/context_kv/writers.py`).
    """
    if qk.shape[0] == 0:
        return
    heads = q_heads + k_heads
    group = max(_TILE // head_dim, 1)
    _qk_norm_rope_kernel[(qk.shape[0], triton.cdiv(heads, group))](
        qk,
        positions,
        q_norm,
        k_norm,
        cos_sin,
        qk.stride(0),
        Q_HEADS=q_heads,
        HEADS=heads,
        GROUP=group,
        DIM=head_dim,
        EPS=eps,
        num_warps=_WARPS,
    )


def qk_norm_rope_torch_(
    qk: Tensor,
    positions: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos_sin: Tensor,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """The definition of `qk_norm_rope_` in torch operations, but for the order of the norm's sum."""
    heads = qk[:, : (q_heads + k_heads) * head_dim].unflatten(1, (-1, head_dim))
    norms = torch.cat((q_norm.expand(q_heads, -1), k_norm.expand(k_heads, -1))).float()
    x = heads.float()
    x = x * (1 / (x.square().mean(-1, keepdim=True) + eps).sqrt()) * norms
    first, second = x.bfloat16().float().chunk(2, dim=-1)
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)  # [T, 1, head_dim / 2]
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


# Parts of positions begin anywhere: specialised alignment would compile the kernel anew in the middle of serving.
@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _qk_norm_rope_kernel(
    qk_ptr,
    positions_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_sin_ptr,
    row_stride,
    Q_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    EPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    half = tl.arange(0, HALF)[None, :]
    live = head < HEADS
    first_ptr = qk_ptr + row * row_stride + head * DIM + half
    first = tl.load(first_ptr, mask=live, other=0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=live, other=0).to(tl.float32)
    # Tiles, where one row would do for all heads: a thread reads what it needs, 16 bytes at a time.
    lane = half + tl.zeros_like(head)
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + row).to(tl.int64) * DIM + lane
    cos = tl.load(angle_ptr).to(tl.float32)
    sin = tl.load(angle_ptr + HALF).to(tl.float32)
    is_query, is_key = head < Q_HEADS, (head >= Q_HEADS) & live
    q_first = tl.load(q_norm_ptr + lane, mask=is_query, other=0)
    q_second = tl.load(q_norm_ptr + HALF + lane, mask=is_query, other=0)
    k_first = tl.load(k_norm_ptr + lane, mask=is_key, other=0)
    k_second = tl.load(k_norm_ptr + HALF + lane, mask=is_key, other=0)
    first_norm = tl.where(is_query, q_first, k_first).to(tl.float32)
    second_norm = tl.where(is_query, q_second, k_second).to(tl.float32)

    mean = _sum_of_halves(first * first, second * second, GROUP, DIM) / DIM
    scale = (1.0 / tl.sqrt(mean + EPS))[:, None]
    first, second = normed_and_rotated(first, second, scale, first_norm, second_norm, cos, sin)
    tl.store(first_ptr, first, mask=live)
    tl.store(first_ptr + HALF, second, mask=live)


@triton.jit
def normed_and_rotated(first, second, scale, first_norm, second_norm, cos, sin):
    """Halves of heads in float32 -> normed and rotated, in bfloat16. scale: the norm's, without its weights."""
    first = (first * scale * first_norm).to(tl.bfloat16).to(tl.float32)
    second = (second * scale * second_norm).to(tl.bfloat16).to(tl.float32)
    # Which product is rounded before the sum is the compiler's choice, tile by tile, where it is not written down.
    rotated_first = tl.fma(first, cos, -(second * sin)).to(tl.bfloat16)
    rotated_second = tl.fma(first, sin, second * cos).to(tl.bfloat16)
    return rotated_first, rotated_second


@triton.jit
def _sum_of_halves(first, second, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Sums [ROWS] over heads whose halves are `first` and `second`, [ROWS, DIM / 2] each.

    Pair by pair, in the order in which Triton adds up DIM elements that four warps hold: those of a thread,
    neighbours first, across the lanes of a warp, the furthest first, and across the warps likewise. A sum over an
    axis of more than two would have an order that depends on the tile's layout.
    """
    EACH: tl.constexpr = max(DIM // 128, 1)  # elements of a thread
    LANES: tl.constexpr = min(DIM // EACH, 32)
    WARPS: tl.constexpr = DIM // EACH // LANES
    if WARPS == 1:  # its lanes hold both halves
        sums = _folded(first + second, ROWS, DIM // 2)
    else:
        PARTS: tl.constexpr = ROWS * (WARPS // 2)
        first = _folded(_neighbours(first, PARTS * LANES, EACH), PARTS, LANES)
        second = _folded(_neighbours(second, PARTS * LANES, EACH), PARTS, LANES)
        sums = _folded(first + second, ROWS, WARPS // 2)
    return sums


@triton.jit
def _neighbours(x, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """x of ROWS * LENGTH elements -> sums [ROWS], neighbours first. LENGTH: a power of 2, as below."""
    for i in tl.static_range(LENGTH.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (ROWS, LENGTH >> (i + 1), 2)), 2)
    return tl.reshape(x, (ROWS,))


@triton.jit
def _folded(x, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """x of ROWS * LENGTH elements -> sums [ROWS], elements half of the length apart first."""
    for i in tl.static_range(LENGTH.bit_length() - 1):
        x = tl.sum(tl.reshape(x, (ROWS, 2, LENGTH >> (i + 1))), 1)
    return tl.reshape(x, (ROWS,))
