"""The best token of each row of logits as one sortable integer, in one pass over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOW_BITS = 0xFFFFFFFF
# One program takes TILE * TILES logits of a row. A thread has all of its loads under way before it compares any:
# 64 logits, 16 bytes a load.
_TILE = 2048
_TILES = 8
_WARPS = 8
_MERGED_ROWS = 32  # by one program


def pack_shard(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """The best token of a shard as one sortable integer per row, so that one gather carries value and id.

    logits [N, rows] of any float dtype, rows contiguous (rows may be 0), first_id: id of row 0 -> [N] int64: the
    order of the float32 value in the high 32 bits, the complement of the id in the low ones, so that equal values
    prefer the lower id. NaN counts as infinity.
    """
    return (pack_shard_triton if logits.is_cuda and logits.numel() else pack_shard_torch)(logits, first_id)


def merge_shards(packed: torch.Tensor) -> torch.Tensor:
    """packed [shards, N] of pack_shard -> ids [N] int64 of the best token over all shards."""
    return (merge_shards_triton if packed.is_cuda and packed.numel() else merge_shards_torch)(packed)


def best_ids(logits: torch.Tensor, first_id: int = 0) -> torch.Tensor:
    """logits as of `pack_shard`, the only shard -> ids [N] int64 of the best token of each row."""
    on_gpu = logits.is_cuda and logits.numel()
    return merge_shards(_pack_parts(logits, first_id) if on_gpu else pack_shard_torch(logits, first_id)[None])


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
    """`pack_shard` as one Triton launch over parts of rows and a maximum over the parts."""
    return _pack_parts(logits, first_id).amax(dim=0)


def merge_shards_torch(packed: torch.Tensor) -> torch.Tensor:
    """The definition of `merge_shards` in torch operations."""
    return LOW_BITS - (packed.amax(dim=0) & LOW_BITS)


def merge_shards_triton(packed: torch.Tensor) -> torch.Tensor:
    """`merge_shards` as one Triton launch."""
    shards, rows = packed.shape
    ids = torch.empty(rows, dtype=torch.int64, device=packed.device)
    _merge_kernel[(triton.cdiv(rows, _MERGED_ROWS),)](
        packed, ids, shards, rows, SHARDS=triton.next_power_of_2(shards), ROWS=_MERGED_ROWS, num_warps=1
    )
    return ids


def _pack_parts(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """[parts, N] int64: each part of a row packed as a shard of its own."""
    rows, width = logits.shape
    parts = triton.cdiv(width, _TILE * _TILES)
    packed = torch.empty((parts, rows), dtype=torch.int64, device=logits.device)
    _pack_kernel[(rows, parts)](
        logits, packed, logits.stride(0), width, first_id, TILE=_TILE, TILES=_TILES, num_warps=_WARPS
    )
    return packed


@triton.jit(do_not_specialize=["first_id"])
def _pack_kernel(logits_ptr, packed_ptr, row_stride, width, first_id, TILE: tl.constexpr, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    start = part * TILE * TILES
    tile = tl.arange(0, TILES)[:, None]
    lane = tl.arange(0, TILE)
    ids = start + tile * TILE + lane[None, :]
    logit = tl.load(logits_ptr + row * row_stride + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    logit = tl.minimum(logit, float("inf"))  # of NaN and a number, the number
    best = tl.max(tl.max(logit, axis=0), axis=0)
    # The lowest id with it. Past the row is -inf: where that is the best, so is the part's first logit.
    of_lane = tl.min(tl.where(logit == best, tile, TILES), axis=0)
    best_id = tl.min(tl.where(of_lane < TILES, start + of_lane * TILE + lane, width), axis=0)
    bits = (best + 0.0).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    packed = (order << 32) | (0xFFFFFFFF - (best_id.to(tl.int64) + first_id))
    tl.store(packed_ptr + part.to(tl.int64) * tl.num_programs(0) + row, packed)


@triton.jit(do_not_specialize=["shards", "rows"])
def _merge_kernel(packed_ptr, ids_ptr, shards, rows, SHARDS: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    shard = tl.arange(0, SHARDS)[:, None]
    inside = (shard < shards) & (row < rows)[None, :]
    at = shard.to(tl.int64) * rows + row[None, :]
    packed = tl.load(packed_ptr + at, mask=inside, other=-9223372036854775808)
    tl.store(ids_ptr + row, 0xFFFFFFFF - (tl.max(packed, axis=0) & 0xFFFFFFFF), mask=row < rows)
