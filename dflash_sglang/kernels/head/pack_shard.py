"""The best tokens of each row of logits, each as one sortable integer, in one pass over the logits."""

from __future__ import annotations

from typing import NamedTuple

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


class Candidates(NamedTuple):
    """The likeliest tokens of each row or position, the likeliest first."""

    ids: torch.Tensor  # [..., K] int64, contiguous
    logprobs: torch.Tensor  # [..., K] float32, contiguous, over the whole vocabulary; one of -inf is no candidate


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


class Scaling(NamedTuple):
    """What a head makes of its logits before the softmax. It is monotone: the order of tokens stays."""

    multiplier: float = 1.0  # positive
    softcap: float | None = None

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 -> float32. A logit of -inf stays: such a token has no chance."""
        scaled = logits if self.multiplier == 1.0 else logits * self.multiplier
        if self.softcap is not None:
            scaled = (self.softcap * torch.tanh(scaled / self.softcap)).where(logits > float("-inf"), logits)
        return scaled


AS_IS = Scaling()


def pack_best(logits: torch.Tensor, first_id: int, count: int, scaling: Scaling = AS_IS) -> torch.Tensor:
    """logits as of `pack_shard` -> [parts * (count + 1), N] int64. Of each part of the shard: its `count` best
    tokens, packed, ABSENT where it has fewer; then the bits of a float32, the logarithm of its sum of exponentials
    of the scaled logits."""
    on_gpu = logits.is_cuda and logits.numel()
    return (pack_best_triton if on_gpu else pack_best_torch)(logits, first_id, count, scaling)


def merge_parts(packed: torch.Tensor, count: int) -> torch.Tensor:
    """packed of `pack_best` -> [count + 1, N] int64: all parts as a single one. Shards have different numbers of
    parts, and ranks gather as many rows."""
    on_gpu = packed.is_cuda and packed.numel()
    return (merge_parts_triton if on_gpu else merge_parts_torch)(packed, count)


def merge_best(
    packed: torch.Tensor,
    count: int,
    scaling: Scaling = AS_IS,
    target_ids: torch.Tensor | None = None,
    out: Candidates | None = None,
) -> Candidates:
    """packed of `pack_best` or `merge_parts`, of all shards -> the best tokens of each row, the best first and of
    equal ones the lower id first. `out`, if given, is written.

    scaling: as given to `pack_best`. target_ids [vocabulary] int64: what ids become, None for themselves. A token
    of logit -inf has logprob -inf, one of an infinite scaled logit 0. Where the vocabulary has fewer tokens than
    `count`, id 0 with logprob -inf stands for the others.
    """
    if out is None:
        shape, device = (packed.shape[1], count), packed.device
        out = Candidates(
            torch.empty(shape, dtype=torch.int64, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )
    on_gpu = packed.is_cuda and packed.numel()
    (merge_best_triton if on_gpu else merge_best_torch)(packed, count, scaling, target_ids, out)
    return out


def pack_shard_torch(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """The definition of `pack_shard` in torch operations."""
    return _pack_largest(_numbers(logits), first_id)


def pack_shard_triton(logits: torch.Tensor, first_id: int) -> torch.Tensor:
    """`pack_shard` as one Triton launch over parts of rows and a maximum over the parts."""
    return _pack_parts(logits, first_id).amax(dim=0)


def merge_shards_torch(packed: torch.Tensor) -> torch.Tensor:
    """The definition of `merge_shards` in torch operations."""
    return LOW_BITS - (packed.amax(dim=0) & LOW_BITS)


def merge_shards_triton(packed: torch.Tensor) -> torch.Tensor:
    """`merge_shards` as one Triton launch."""
    ids = torch.empty_like(packed[0])
    _launch_merge(packed, ids, 1, sums=False)
    return ids


def pack_best_torch(logits: torch.Tensor, first_id: int, count: int, scaling: Scaling = AS_IS) -> torch.Tensor:
    """The definition of `pack_best` in torch operations: one part."""
    numbers = _numbers(logits)
    width = logits.shape[1]
    if count == 1:
        best = _pack_largest(numbers, first_id)[None]
    else:
        packed = _packed(numbers, torch.arange(first_id, first_id + width, device=logits.device))
        best = packed.topk(min(count, width), dim=-1).values.T
        best = torch.nn.functional.pad(best, (0, 0, 0, count - len(best)), value=ABSENT)
    return torch.cat([best, _bits(scaling.of(numbers).logsumexp(dim=-1))[None]])


def pack_best_triton(logits: torch.Tensor, first_id: int, count: int, scaling: Scaling = AS_IS) -> torch.Tensor:
    """`pack_best` as one Triton launch."""
    return _pack_parts(logits, first_id, count, scaling)


def merge_parts_torch(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The definition of `merge_parts` in torch operations."""
    if len(packed) == count + 1:
        return packed
    parts = packed.unflatten(0, (-1, count + 1))
    best = parts[:, :count].flatten(0, 1).topk(count, dim=0).values
    return torch.cat([best, _bits(_number(parts[:, count]).logsumexp(dim=0))[None]])


def merge_parts_triton(packed: torch.Tensor, count: int) -> torch.Tensor:
    """`merge_parts` as one Triton launch."""
    merged = packed.new_empty((count + 1, packed.shape[1]))
    _launch_merge(packed, merged, count)
    return merged


def merge_best_torch(
    packed: torch.Tensor, count: int, scaling: Scaling, target_ids: torch.Tensor | None, out: Candidates
) -> None:
    """The definition of `merge_best` in torch operations."""
    merged = merge_parts_torch(packed, count)
    best, total = merged[:count].T, _number(merged[count])[:, None]
    value = sortable.fn((best >> 32).to(torch.int32)).view(torch.float32)
    scaled = scaling.of(value)
    logprobs = torch.where(value > float("-inf"), scaled - total, float("-inf"))
    ids = torch.where(best == ABSENT, 0, LOW_BITS - (best & LOW_BITS))
    out.ids.copy_(ids if target_ids is None else target_ids[ids])
    out.logprobs.copy_(torch.where(scaled == float("inf"), 0.0, logprobs))


def merge_best_triton(
    packed: torch.Tensor, count: int, scaling: Scaling, target_ids: torch.Tensor | None, out: Candidates
) -> None:
    """`merge_best` as one Triton launch."""
    _launch_merge(packed, out.ids, count, out.logprobs, scaling, target_ids)


def _pack_largest(numbers: torch.Tensor, first_id: int) -> torch.Tensor:
    """[N, rows] float32 -> [N] int64: a maximum takes less time than the largest few."""
    if numbers.shape[1] == 0:
        return torch.full((len(numbers),), ABSENT, device=numbers.device)
    value, index = numbers.max(dim=-1)
    return _packed(value, index + first_id)


def _packed(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """values float32, ids int64 -> int64"""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    return (sortable.fn(bits).to(torch.int64) << 32) | (LOW_BITS - ids)


def _numbers(logits: torch.Tensor) -> torch.Tensor:
    """float32, infinity for NaN."""
    return logits.float().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))


def _bits(values: torch.Tensor) -> torch.Tensor:
    """float32 -> int64"""
    return values.view(torch.int32).to(torch.int64)


def _number(bits: torch.Tensor) -> torch.Tensor:
    """`_bits` undone."""
    return bits.to(torch.int32).view(torch.float32)


def _pack_parts(
    logits: torch.Tensor, first_id: int, count: int = 1, scaling: Scaling | None = None
) -> torch.Tensor:
    """[parts * count, N] int64: the best of each part of a row, packed; as of `pack_best` with a scaling."""
    rows, width = logits.shape
    parts, sums = triton.cdiv(width, _TILE * _TILES), scaling is not None
    packed = torch.empty((parts * (count + sums), rows), dtype=torch.int64, device=logits.device)
    multiplier, softcap = scaling or AS_IS
    _pack_kernel[(rows, parts)](
        logits, packed, logits.stride(0), width, first_id, multiplier, softcap or 1.0,
        TILE=_TILE, TILES=_TILES, COUNT=count, SUMS=sums, CAPPED=softcap is not None, num_warps=_WARPS,
    )  # fmt: skip
    return packed


def _launch_merge(
    packed: torch.Tensor,
    out: torch.Tensor,
    count: int,
    logprobs: torch.Tensor | None = None,
    scaling: Scaling = AS_IS,
    target_ids: torch.Tensor | None = None,
    sums: bool = True,
) -> None:
    """packed: with sums or without. out: ids [N, count]; with sums and without logprobs, packed as of
    `merge_parts`."""
    slots, rows = packed.shape
    parts = slots // (count + sums)
    merged_rows = max(1, _MERGED_ROWS // triton.next_power_of_2(count))
    multiplier, softcap = scaling
    _merge_kernel[(triton.cdiv(rows, merged_rows),)](
        packed, out, out if logprobs is None else logprobs, out if target_ids is None else target_ids,
        multiplier, softcap or 1.0, parts, rows,
        CANDIDATES=triton.next_power_of_2(parts * count), PARTS=triton.next_power_of_2(parts), ROWS=merged_rows,
        COUNT=count, SUMS=sums, PACKED=sums and logprobs is None, MAPPED=target_ids is not None,
        CAPPED=softcap is not None, num_warps=1,
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


@triton.jit
def _scale(logits, multiplier, softcap, CAPPED: tl.constexpr):
    """`Scaling.of`"""
    scaled = logits * multiplier
    if CAPPED:
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * scaled / softcap) + 1.0)
        scaled = tl.where(logits > float("-inf"), softcap * tanh, float("-inf"))
    return scaled


@triton.jit(do_not_specialize=["first_id"])
def _pack_kernel(
    logits_ptr, packed_ptr, row_stride, width, first_id, multiplier, softcap,
    TILE: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr, SUMS: tl.constexpr, CAPPED: tl.constexpr,
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
    slots: tl.constexpr = COUNT + 1 if SUMS else COUNT
    at = part.to(tl.int64) * slots * rows + row
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
        most = _scale(tl.max(best, axis=0), multiplier, softcap, CAPPED)
        finite = tl.minimum(tl.maximum(most, -3.0e38), 3.0e38)
        scaled = _scale(logit, multiplier, softcap, CAPPED)
        total = tl.sum(tl.sum(tl.exp(scaled - finite), axis=0), axis=0)
        bits = (finite + tl.log(total)).to(tl.int32, bitcast=True)
        tl.store(packed_ptr + at + COUNT * rows, bits.to(tl.int64))


@triton.jit(do_not_specialize=["parts", "rows"])
def _merge_kernel(
    packed_ptr, out_ptr, logprobs_ptr, target_ids_ptr, multiplier, softcap, parts, rows,
    CANDIDATES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, SUMS: tl.constexpr,
    PACKED: tl.constexpr, MAPPED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    candidate = tl.arange(0, CANDIDATES)[:, None]
    slot = candidate + candidate // COUNT if SUMS else candidate  # the sum of each part follows its tokens
    packed = tl.load(
        packed_ptr + slot.to(tl.int64) * rows + row[None, :],
        mask=(candidate < parts * COUNT) & live[None, :],
        other=-9223372036854775808,
    )
    if SUMS:
        part = tl.arange(0, PARTS)[:, None]
        at = (part.to(tl.int64) * (COUNT + 1) + COUNT) * rows + row[None, :]
        bits = tl.load(packed_ptr + at, mask=(part < parts) & live[None, :], other=0).to(tl.int32)
        sums = tl.where(part < parts, bits.to(tl.float32, bitcast=True), float("-inf"))
        most = tl.minimum(tl.maximum(tl.max(sums, axis=0), -3.0e38), 3.0e38)
        total = most + tl.log(tl.sum(tl.exp(sums - most[None, :]), axis=0))
    for k in tl.static_range(COUNT):
        best = tl.max(packed, axis=0)
        packed = tl.where(packed == best[None, :], -9223372036854775808, packed)
        if PACKED:
            tl.store(out_ptr + k * rows + row.to(tl.int64), best, mask=live)
        else:
            out = row.to(tl.int64) * COUNT + k
            ids = tl.where(best == -9223372036854775808, 0, 0xFFFFFFFF - (best & 0xFFFFFFFF))
            if MAPPED:
                ids = tl.load(target_ids_ptr + ids, mask=live, other=0)
            tl.store(out_ptr + out, ids, mask=live)
            if SUMS:
                value = sortable((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
                scaled = _scale(value, multiplier, softcap, CAPPED)
                logprob = tl.where(value > float("-inf"), scaled - total, float("-inf"))  # no number where absent
                tl.store(logprobs_ptr + out, tl.where(scaled == float("inf"), 0.0, logprob), mask=live)
    if PACKED:
        bits = total.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(out_ptr + COUNT * rows + row.to(tl.int64), bits, mask=live)
