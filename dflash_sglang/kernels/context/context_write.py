"""Context K/V of all draft layers into fp8 pools in one launch: k-norm, RoPE, cast and store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


class Fp8Rows:
    """The rows of the draft layers' K and V buffers, all of one shape and one of the FORMATS.

    keys, values: per layer [slots, heads, head_dim], rows contiguous.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.keys, self.values = keys, values
        addresses = [[k.data_ptr(), v.data_ptr()] for k, v in zip(keys, values, strict=True)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=keys[0].device)  # [layers, 2]


def write_fp8_rows(
    kv: Tensor,  # [tokens, layers, 2 * heads * head_dim] bfloat16, contiguous, keys before values
    k_norms: Tensor,  # [layers, head_dim] bfloat16
    cos_sin: Tensor,  # [positions, head_dim] cosines, then sines, of the halves of a head
    positions: Tensor,  # [tokens] int64
    slots: Tensor,  # [tokens] int64, rows of the pools
    eps: float,
    rows: Fp8Rows,
) -> None:
    """Write every token's K (normed, rotated) and V of every layer at its slot.

    Roundings are those of the block's keys and of `set_kv_buffer`: bfloat16 after the norm and after the
    rotation, then the pool's format. What exceeds the format is clamped to its largest value, where torch's cast
    makes NaN or infinity.
    """
    launch = write_fp8_rows_triton if kv.is_cuda else write_fp8_rows_torch
    launch(kv, k_norms, cos_sin, positions, slots, eps, rows)


def write_fp8_rows_torch(
    kv: Tensor, k_norms: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, eps: float, rows: Fp8Rows
) -> None:
    """The definition of `write_fp8_rows` in torch operations."""
    heads, dim = rows.keys[0].shape[1:]
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, dim=-1)  # [tokens, 1, head_dim / 2]
    for layer, (keys, values) in enumerate(zip(rows.keys, rows.values, strict=True)):
        k, v = kv[:, layer].view(-1, 2, heads, dim).unbind(1)
        k = k.float()
        k = k * (1 / (k.square().mean(-1, keepdim=True) + eps).sqrt()) * k_norms[layer].float()
        first, second = k.bfloat16().float().chunk(2, dim=-1)
        k = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).bfloat16()
        for buffer, row in ((keys, k), (values, v)):
            most = torch.finfo(buffer.dtype).max
            # torch cannot scatter into float8 tensors
            buffer.view(torch.uint8)[slots] = row.clamp(-most, most).to(buffer.dtype).view(torch.uint8)


def write_fp8_rows_triton(
    kv: Tensor, k_norms: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, eps: float, rows: Fp8Rows
) -> None:
    """`write_fp8_rows` as one Triton launch, one program per token, layer and head."""
    heads, dim = rows.keys[0].shape[1:]
    tokens, layers, _ = kv.shape
    dtype = rows.keys[0].dtype
    _write_fp8_rows_kernel[(tokens, layers, heads)](
        kv, rows.addresses, k_norms, cos_sin, positions, slots, rows.keys[0].stride(0), rows.values[0].stride(0),
        LAYERS=layers, HEADS=heads, DIM=dim, EPS=eps, FORMAT=FORMATS[dtype], MOST=torch.finfo(dtype).max,
    )  # fmt: skip


@triton.jit
def _write_fp8_rows_kernel(
    kv_ptr, addresses_ptr, k_norms_ptr, cos_sin_ptr, positions_ptr, slots_ptr, key_stride, value_stride,
    LAYERS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr,
    FORMAT: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2)
    HALF: tl.constexpr = DIM // 2
    lane, half = tl.arange(0, DIM), tl.arange(0, HALF)
    key_ptr = kv_ptr + (token * LAYERS + layer) * (2 * HEADS * DIM) + head * DIM
    value_ptr = key_ptr + HEADS * DIM
    angle_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * DIM + half
    cos = tl.load(angle_ptr).to(tl.float32)
    sin = tl.load(angle_ptr + HALF).to(tl.float32)

    whole = tl.load(key_ptr + lane).to(tl.float32)
    # Sum and root have the bits of the block's keys (SGLang's `table_qk_norm_rope_`): they decide roundings.
    scale = 1.0 / tl.sqrt(tl.sum(whole * whole, 0) / DIM + EPS)
    norm_ptr = k_norms_ptr + layer * DIM + half
    first = tl.load(key_ptr + half).to(tl.float32)
    second = tl.load(key_ptr + HALF + half).to(tl.float32)
    first_norm = tl.load(norm_ptr).to(tl.float32)
    second_norm = tl.load(norm_ptr + HALF).to(tl.float32)
    first = (first * scale * first_norm).to(tl.bfloat16).to(tl.float32)
    second = (second * scale * second_norm).to(tl.bfloat16).to(tl.float32)
    # Which product is rounded before the sum is the compiler's choice, tile by tile, where it is not written down.
    key_first = tl.fma(first, cos, -(second * sin)).to(tl.bfloat16).to(tl.float32)
    key_second = tl.fma(first, sin, second * cos).to(tl.bfloat16).to(tl.float32)
    value = tl.load(value_ptr + lane).to(tl.float32)
    first = tl.minimum(tl.maximum(key_first, -MOST), MOST)
    second = tl.minimum(tl.maximum(key_second, -MOST), MOST)
    value = tl.minimum(tl.maximum(value, -MOST), MOST)

    slot = tl.load(slots_ptr + token).to(tl.int64)
    keys = tl.load(addresses_ptr + layer * 2).to(tl.pointer_type(FORMAT)) + slot * key_stride + head * DIM
    values = tl.load(addresses_ptr + layer * 2 + 1).to(tl.pointer_type(FORMAT)) + slot * value_stride + head * DIM
    tl.store(keys + half, first.to(FORMAT))
    tl.store(keys + HALF + half, second.to(FORMAT))
    tl.store(values + lane, value.to(FORMAT))
