"""Block input in one launch: ids, positions, KV slots, prefix length and row of every request's block, and the
place of the step's outcome."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class BlockTensors(NamedTuple):
    """What `prepare_block` fills; of bs or more requests, where a graph has room for more."""

    ids: Tensor  # [bs, block]
    positions: Tensor  # [bs, block]
    slots: Tensor  # [bs, block]
    prefix_lens: Tensor  # [bs]
    requests: Tensor  # [bs] rows of req_to_token
    step: Tensor  # [1] the step's place among the outcomes, for kernels of a captured graph


class BlockSources(NamedTuple):
    """What `prepare_block` reads."""

    seq_lens: Tensor  # [rows] committed tokens whose KV is written, by row of req_to_token
    bonus_tokens: Tensor  # [rows] last committed token
    req_pool_indices: Tensor  # [bs] each request's row
    req_to_token: Tensor  # [rows, row_width] int32 slots


def prepare_block(
    sources: BlockSources, mask_token_id: int, longest: int, place: int, out: BlockTensors, filler: int = 1
) -> None:
    """Fill the block of every request: last token + masks, at the positions after its prefix.

    longest: committed tokens of a request that needs another step, at most. One that has more (it has already
    finished, and its result is still in flight) is moved back there: it then only touches slots of its own that
    nothing commits. Requests that only pad have row, slots and positions 0, and `filler` for a length.
    """
    launch = prepare_block_triton if sources.req_pool_indices.is_cuda else prepare_block_torch
    launch(sources, mask_token_id, longest, place, out, filler)


def prepare_block_torch(
    sources: BlockSources, mask_token_id: int, longest: int, place: int, out: BlockTensors, filler: int
) -> None:
    """The definition of `prepare_block` in torch operations."""
    block, rows = out.ids.shape[1], sources.req_pool_indices.long()
    bs = len(rows)
    prefix_lens, positions = out.prefix_lens[:bs], out.positions[:bs]
    torch.clamp(sources.seq_lens[rows], max=longest, out=prefix_lens)
    out.ids.fill_(mask_token_id)
    out.ids[:bs, 0] = sources.bonus_tokens[rows]
    torch.add(prefix_lens[:, None], torch.arange(block, device=out.ids.device), out=positions)
    out.slots[:bs].copy_(sources.req_to_token[rows[:, None], positions])
    out.requests[:bs].copy_(rows)
    for padded, value in ((out.positions, 0), (out.slots, 0), (out.requests, 0), (out.prefix_lens, filler)):
        padded[bs:] = value
    out.step.fill_(place)


def prepare_block_triton(
    sources: BlockSources, mask_token_id: int, longest: int, place: int, out: BlockTensors, filler: int
) -> None:
    """`prepare_block` as one Triton launch, one program per request."""
    padded, block = out.ids.shape
    _prepare_block_kernel[(padded,)](
        *sources, *out, sources.req_to_token.stride(0), mask_token_id, longest, place,
        len(sources.req_pool_indices), filler, BLOCK=block, LANES=triton.next_power_of_2(block),
    )  # fmt: skip


# Specialised values would compile the kernel anew in the middle of serving.
@triton.jit(do_not_specialize=["place", "bs", "filler"])
def _prepare_block_kernel(
    seq_lens_ptr, bonus_ptr, req_ptr, req_to_token_ptr,
    ids_ptr, positions_ptr, slots_ptr, prefix_ptr, requests_ptr, step_ptr,
    row_stride, mask_token_id, longest, place, bs, filler,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    live = lane < BLOCK
    real = request < bs
    row = tl.load(req_ptr + request, mask=real, other=0).to(tl.int64)
    prefix = tl.minimum(tl.load(seq_lens_ptr + row).to(tl.int64), longest)
    prefix = tl.where(real, prefix, filler)
    position = tl.where(real, prefix + lane, 0)
    token = tl.where((lane == 0) & real, tl.load(bonus_ptr + row).to(tl.int64), mask_token_id)
    slot = tl.load(req_to_token_ptr + row * row_stride + position, mask=live & real, other=0)
    out = request * BLOCK + lane
    tl.store(ids_ptr + out, token, mask=live)
    tl.store(positions_ptr + out, position, mask=live)
    tl.store(slots_ptr + out, slot.to(tl.int64), mask=live)
    tl.store(prefix_ptr + request, prefix)
    tl.store(requests_ptr + request, row)
    if request == 0:
        tl.store(step_ptr, place.to(tl.int64))
