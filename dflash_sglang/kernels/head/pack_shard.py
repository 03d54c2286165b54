"""The best tokens of each row of logits, each as one sortable integer, in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOW_BITS = 0xFFFFFFFF
ABSENT = torch.iinfo(torch.int64).min  # packed, of no token: shards can have fewer tokens than are asked for
# One program takes TILE * TILES logits of a row. A thread has all of its loads under way before it compares any:
# 64 logits, 16 bytes a load.
_TILE = 2048
_TILES = 8
_WARPS = 8
_MERGED_ROWS = 32  # by one program, of one token each


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


def pack_chances(logits: torch.Tensor, first_id: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits as of `pack_shard` -> the `count` best tokens of each part of the shard, packed [parts * count, N]
    int64, ABSENT where a part has fewer; and the logarithms of the parts' sums of exponentials [parts, N] float32.

    All ranks of equal shards have as many parts. Any order of the packed rows gives the same merge.
    """
    on_gpu = logits.is_cuda and logits.numel()
    return (pack_chances_triton if on_gpu else pack_chances_torch)(logits, first_id, count)


def merge_chances(packed: torch.Tensor, sums: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all parts of all shards -> ids [N, count] int64 of the best tokens of each row, the best first and of
    equal ones the lower id first; and their logprobs [N, count] float32.

    A token of logit -inf has logprob -inf, one of an infinite logit 0. Where the vocabulary has fewer tokens than
    `count`, id 0 with logprob -inf stands for the others.
    """
    on_gpu = packed.is_cuda and packed.numel()
    return (merge_chances_triton if on_gpu else merge_chances_torch)(packed, sums, count)


def pack_shard_torch(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """The definition of `pack_shard` in torch operations."""
    if logits.shape[1] == 0:
        return torch.full((logits.shape[0],), ABSENT, device=logits.device)
    value, index = _numbers(logits).max(dim=-1)
    return _packed(value, index + first_id)


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


def pack_chances_torch(logits: torch.Tensor, first_id: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `pack_chances` in torch operations: one part."""
    numbers = _numbers(logits)
    width = logits.shape[1]
    packed = _packed(numbers, torch.arange(first_id, first_id + width, device=logits.device))
    best = packed.topk(min(count, width), dim=-1).values
    best = torch.nn.functional.pad(best, (0, count - best.shape[1]), value=ABSENT)
    return best.T.contiguous(), numbers.logsumexp(dim=-1)[None]


def pack_chances_triton(logits: torch.Tensor, first_id: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`pack_chances` as one Triton launch."""
    sums = _of_parts(logits, torch.float32)
    return _pack_parts(logits, first_id, sums, count), sums


def merge_chances_torch(packed: torch.Tensor, sums: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition of `merge_chances` in torch operations."""
    best = packed.topk(count, dim=0).values.T
    value = sortable.fn((best >> 32).to(torch.int32)).view(torch.float32)
    logprobs = torch.where(value > float("-inf"), value - sums.logsumexp(dim=0)[:, None], float("-inf"))
    ids = torch.where(best == ABSENT, 0, LOW_BITS - (best & LOW_BITS))
    return ids, torch.where(value == float("inf"), 0.0, logprobs)


def merge_chances_triton(
    packed: torch.Tensor, sums: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_chances` as one Triton launch."""
    ids = packed.new_empty((packed.shape[1], count))
    logprobs = sums.new_empty(ids.shape)
    _launch_merge(packed, ids, sums, logprobs)
    return ids, logprobs


def _packed(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """values float32, ids int64 -> int64"""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    return (sortable.fn(bits).to(torch.int64) << 32) | (LOW_BITS - ids)


def _numbers(logits: torch.Tensor) -> torch.Tensor:
    """float32, infinity for NaN."""
    return logits.float().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))


def _of_parts(logits: torch.Tensor, dtype: torch.dtype, count: int = 1) -> torch.Tensor:
    """[parts * count, N], not filled."""
    rows, width = logits.shape
    return torch.empty((triton.cdiv(width, _TILE * _TILES) * count, rows), dtype=dtype, device=logits.device)


def _pack_parts(
    logits: torch.Tensor, first_id: int, sums: torch.Tensor | None = None, count: int = 1
) -> torch.Tensor:
    """[parts * count, N] int64: the best of each part of a row, packed. sums, if given, is written."""
    packed = _of_parts(logits, torch.int64, count)
    rows, width = logits.shape
    _pack_kernel[(rows, triton.cdiv(width, _TILE * _TILES))](
        logits, packed, packed if sums is None else sums, logits.stride(0), width, first_id,
        TILE=_TILE, TILES=_TILES, COUNT=count, SUMS=sums is not None, num_warps=_WARPS,
    )  # fmt: skip
    return packed


def _launch_merge(
    packed: torch.Tensor, ids: torch.Tensor, sums: torch.Tensor | None = None, logprobs: torch.Tensor | None = None
) -> None:
    """ids [N] or [N, count], logprobs like it."""
    candidates, rows = packed.shape
    count = ids.numel() // rows
    parts = candidates if sums is None else len(sums)
    merged_rows = max(1, _MERGED_ROWS // triton.next_power_of_2(count))
    _merge_kernel[(triton.cdiv(rows, merged_rows),)](
        packed, ids, packed if sums is None else sums, ids if logprobs is None else logprobs,
        candidates, parts, rows,
        CANDIDATES=triton.next_power_of_2(candidates), PARTS=triton.next_power_of_2(parts),
        ROWS=merged_rows, COUNT=count, SUMS=sums is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def sortable(bits):
    """The bits of float32 values -> int32 in the order of the values, and back: as integers, negative values sort
    backwards."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _pack(values, ids, width, first_id):
    """values float32 of the tokens at ids of a shard -> int64, the lowest for what lies past the shard."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    packed = (sortable(bits).to(tl.int64) << 32) | (0xFFFFFFFF - (ids.to(tl.int64) + first_id))
    return tl.where(ids < width, packed, -9223372036854775808)


@triton.jit(do_not_specialize=["first_id"])
def _pack_kernel(
    logits_ptr, packed_ptr, sums_ptr, row_stride, width, first_id,
    TILE: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    rows = tl.num_programs(0)
    start = part * TILE * TILES
    tile = tl.arange(0, TILES)
    lane = tl.arange(0, TILE)
    row_ptr = logits_ptr + row * row_stride
    ids = start + tile[:, None] * TILE + lane[None, :]
    logit = tl.load(row_ptr + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    logit = tl.minimum(logit, float("inf"))  # of NaN and a number, the number
    # The best of each column, the lowest id among equals: past the row, where -inf stands, ids are higher.
    best = tl.max(logit, axis=0)
    of_lane = tl.min(tl.where(logit == best[None, :], tile[:, None], TILES), axis=0)
    packed = _pack(best, start + of_lane * TILE + lane, width, first_id)
    at = part.to(tl.int64) * COUNT * rows + row
    for k in tl.static_range(COUNT):
        taken = tl.max(packed, axis=0)
        tl.store(packed_ptr + at + k * rows, taken)
        if k + 1 < COUNT:
            # Its place takes the next of its column, which is read again.
            column = (0xFFFFFFFF - (taken & 0xFFFFFFFF) - first_id - start) % TILE
            again = start + tile * TILE + column.to(tl.int32)
            values = tl.load(row_ptr + again, mask=again < width, other=float("-inf")).to(tl.float32)
            others = _pack(tl.minimum(values, float("inf")), again, width, first_id)
            following = tl.max(tl.where(others < taken, others, -9223372036854775808), axis=0)
            packed = tl.where(packed == taken, following, packed)
    if SUMS:
        most = tl.max(best, axis=0)
        finite = tl.minimum(tl.maximum(most, -3.0e38), 3.0e38)
        total = tl.sum(tl.sum(tl.exp(logit - finite), axis=0), axis=0)
        tl.store(sums_ptr + part.to(tl.int64) * rows + row, finite + tl.log(total))


@triton.jit(do_not_specialize=["candidates", "parts", "rows"])
def _merge_kernel(
    packed_ptr, ids_ptr, sums_ptr, logprobs_ptr, candidates, parts, rows,
    CANDIDATES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    candidate = tl.arange(0, CANDIDATES)[:, None]
    at = candidate.to(tl.int64) * rows + row[None, :]
    packed = tl.load(packed_ptr + at, mask=(candidate < candidates) & live[None, :], other=-9223372036854775808)
    if SUMS:
        part = tl.arange(0, PARTS)[:, None]
        at = part.to(tl.int64) * rows + row[None, :]
        sums = tl.load(sums_ptr + at, mask=(part < parts) & live[None, :], other=float("-inf"))
        most = tl.minimum(tl.maximum(tl.max(sums, axis=0), -3.0e38), 3.0e38)
        total = most + tl.log(tl.sum(tl.exp(sums - most[None, :]), axis=0))
    for k in tl.static_range(COUNT):
        best = tl.max(packed, axis=0)
        packed = tl.where(packed == best[None, :], -9223372036854775808, packed)
        absent = best == -9223372036854775808
        out = row.to(tl.int64) * COUNT + k
        tl.store(ids_ptr + out, tl.where(absent, 0, 0xFFFFFFFF - (best & 0xFFFFFFFF)), mask=live)
        if SUMS:
            value = sortable((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            logprob = tl.where(value > float("-inf"), value - total, float("-inf"))  # no number where absent
            tl.store(logprobs_ptr + out, tl.where(value == float("inf"), 0.0, logprob), mask=live)
