"""The best token of each row of logits as one sortable integer, in one pass over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOW_BITS = 0xFFFFFFFF
_TILE = 2048
_TILES = 4  # of a row, by one program


def pack_shard(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """The best token of a shard as one sortable integer per row, so that one gather carries value and id.

    logits [N, rows] of any float dtype, rows contiguous (rows may be 0), first_id: id of row 0 -> [N] int64: the
    order of the float32 value in the high 32 bits, the complement of the id in the low ones, so that equal values
    prefer the lower id. NaN counts as infinity.
    """
    return (pack_shard_triton if logits.is_cuda and logits.numel() else pack_shard_torch)(logits, first_id)


def merge_shards(packed: torch.Tensor) -> torch.Tensor:
    """packed [shards, N] of pack_shard -> ids [N] int64 of the best token over all shards."""
    return LOW_BITS - (packed.amax(dim=0) & LOW_BITS)


def pack_shard_torch(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """The definition of `pack_shard` in torch operations."""
    if logits.shape[1] == 0:
        return torch.full((logits.shape[0],), torch.iinfo(torch.int64).min, device=logits.device)
    value, index = (
        logits.float().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf")).max(dim=-1)
    )
    bits = (value + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, negative floats sort backwards
    return (order.to(torch.int64) << 32) | (LOW_BITS - (index + first_id))


def pack_shard_triton(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """`pack_shard` as one fill and one Triton launch: the parts of a row meet in an atomic maximum."""
    rows, width = logits.shape
    packed = torch.full((rows,), torch.iinfo(torch.int64).min, dtype=torch.int64, device=logits.device)
    _pack_kernel[(rows, triton.cdiv(width, _TILE * _TILES))](
        logits, packed, logits.stride(0), width, first_id, TILE=_TILE, TILES=_TILES
    )
    return packed


@triton.jit(do_not_specialize=["first_id"])
def _pack_kernel(logits_ptr, packed_ptr, row_stride, width, first_id, TILE: tl.constexpr, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TILE * TILES
    lane = tl.arange(0, TILE)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    best_id = start + lane
    for tile in tl.static_range(TILES):
        ids = start + tile * TILE + lane
        logit = tl.load(logits_ptr + row * row_stride + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
        logit = tl.where(logit != logit, float("inf"), logit) + 0.0
        better = logit > best
        best_id = tl.where(better, ids, best_id)
        best = tl.where(better, logit, best)
    bits = best.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    packed = (order << 32) | (0xFFFFFFFF - (best_id.to(tl.int64) + first_id))
    # A lane that saw nothing names an id past the row; the row's first part has one that did.
    packed = tl.where(best_id < width, packed, -9223372036854775808)
    tl.atomic_max(packed_ptr + row, tl.max(packed, axis=0))
