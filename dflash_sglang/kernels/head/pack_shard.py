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


def pack_chances(logits: torch.Tensor, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits as of `pack_shard` -> packed [parts, N] int64 of parts of the shard, and the logarithms of their sums
    of exponentials [parts, N] float32. All ranks of equal shards have as many parts."""
    return (pack_chances_triton if logits.is_cuda and logits.numel() else pack_chances_torch)(logits, first_id)


def merge_chances(packed: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all parts of all shards, [parts, N] each -> ids [N] int64 as of `best_ids`, and the logprobs [N] float32
    of those tokens."""
    on_gpu = packed.is_cuda and packed.numel()
    return (merge_chances_triton if on_gpu else merge_chances_torch)(packed, sums)


def pack_shard_torch(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """The definition of `pack_shard` in torch operations."""
    if logits.shape[1] == 0:
        return torch.full((logits.shape[0],), torch.iinfo(torch.int64).min, device=logits.device)
    value, index = _numbers(logits).max(dim=-1)
    bits = (value + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    return (sortable.fn(bits).to(torch.int64) << 32) | (LOW_BITS - (index + first_id))


def pack_shard_triton(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """`pack_shard` as one Triton launch over parts of rows and a maximum over the parts."""
    return _pack_parts(logits, first_id).amax(dim=0)


def merge_shards_torch(packed: torch.Tensor) -> torch.Tensor:
    """The definition of `merge_shards` in torch operations."""
    return LOW_BITS - (packed.amax(dim=0) & LOW_BITS)


def merge_shards_triton(packed: torch.Tensor) -> torch.Tensor:
    """`merge_shards` as one Triton launch."""
    ids = torch.empty_like(packed[0])
    _launch_merge(packed, ids)
    return ids


def pack_chances_torch(logits: torch.Tensor, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `pack_chances` in torch operations: one part."""
    return pack_shard_torch(logits, first_id)[None], _numbers(logits).logsumexp(dim=-1)[None]


def pack_chances_triton(logits: torch.Tensor, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`pack_chances` as one Triton launch."""
    sums = _of_parts(logits, torch.float32)
    return _pack_parts(logits, first_id, sums), sums


def merge_chances_torch(packed: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `merge_chances` in torch operations."""
    best = packed.amax(dim=0)
    order = (best >> 32).to(torch.int32)
    value = sortable.fn(order).view(torch.float32)
    logprob = value - sums.logsumexp(dim=0)
    return LOW_BITS - (best & LOW_BITS), torch.where(value == float("inf"), 0.0, logprob)


def merge_chances_triton(packed: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_chances` as one Triton launch."""
    ids, logprobs = torch.empty_like(packed[0]), torch.empty_like(sums[0])
    _launch_merge(packed, ids, sums, logprobs)
    return ids, logprobs


def _numbers(logits: torch.Tensor) -> torch.Tensor:
    """float32, infinity for NaN."""
    return logits.float().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))


def _of_parts(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[parts, N], not filled."""
    rows, width = logits.shape
    return torch.empty((triton.cdiv(width, _TILE * _TILES), rows), dtype=dtype, device=logits.device)


def _pack_parts(logits: torch.Tensor, first_id: int, sums: torch.Tensor | None = None) -> torch.Tensor:
    """[parts, N] int64: each part of a row packed as a shard of its own. sums, if given, is written."""
    packed = _of_parts(logits, torch.int64)
    parts, rows = packed.shape
    _pack_kernel[(rows, parts)](
        logits, packed, packed if sums is None else sums, logits.stride(0), logits.shape[1], first_id,
        TILE=_TILE, TILES=_TILES, SUMS=sums is not None, num_warps=_WARPS,
    )  # fmt: skip
    return packed


def _launch_merge(
    packed: torch.Tensor, ids: torch.Tensor, sums: torch.Tensor | None = None, logprobs: torch.Tensor | None = None
) -> None:
    shards, rows = packed.shape
    _merge_kernel[(triton.cdiv(rows, _MERGED_ROWS),)](
        packed, ids, packed if sums is None else sums, ids if logprobs is None else logprobs, shards, rows,
        SHARDS=triton.next_power_of_2(shards), ROWS=_MERGED_ROWS, SUMS=sums is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def sortable(bits):
    """The bits of float32 values -> int32 in the order of the values, and back: as integers, negative values sort
    backwards."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["first_id"])
def _pack_kernel(
    logits_ptr, packed_ptr, sums_ptr, row_stride, width, first_id,
    TILE: tl.constexpr, TILES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
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
    packed = (sortable(bits).to(tl.int64) << 32) | (0xFFFFFFFF - (best_id.to(tl.int64) + first_id))
    at = part.to(tl.int64) * tl.num_programs(0) + row
    tl.store(packed_ptr + at, packed)
    if SUMS:
        finite = tl.minimum(tl.maximum(best, -3.0e38), 3.0e38)
        total = tl.sum(tl.sum(tl.exp(logit - finite), axis=0), axis=0)
        tl.store(sums_ptr + at, finite + tl.log(total))


@triton.jit(do_not_specialize=["shards", "rows"])
def _merge_kernel(
    packed_ptr, ids_ptr, sums_ptr, logprobs_ptr, shards, rows,
    SHARDS: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    shard = tl.arange(0, SHARDS)[:, None]
    inside = (shard < shards) & (row < rows)[None, :]
    at = shard.to(tl.int64) * rows + row[None, :]
    packed = tl.load(packed_ptr + at, mask=inside, other=-9223372036854775808)
    best = tl.max(packed, axis=0)
    tl.store(ids_ptr + row, 0xFFFFFFFF - (best & 0xFFFFFFFF), mask=row < rows)
    if SUMS:
        order = (best >> 32).to(tl.int32)
        value = sortable(order).to(tl.float32, bitcast=True)
        sums = tl.load(sums_ptr + at, mask=inside, other=float("-inf"))
        most = tl.maximum(tl.max(sums, axis=0), -3.0e38)
        total = most + tl.log(tl.sum(tl.exp(sums - most[None, :]), axis=0))
        tl.store(logprobs_ptr + row, tl.where(value == float("inf"), 0.0, value - total), mask=row < rows)
