"""Block input in one launch: ids, positions, KV slots and prefix length of every request's block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def prepare_block(
    bonus_tokens: torch.Tensor,  # [bs] last committed token of each request
    seq_lens: torch.Tensor,  # [bs] committed tokens whose KV is written
    req_pool_indices: torch.Tensor,  # [bs] row of req_to_token
    req_to_token: torch.Tensor,  # [max_requests, row_width] int32 slots
    mask_token_id: int,
    row_limit: int,
    ids: torch.Tensor,  # out [bs, block]
    positions: torch.Tensor,  # out [bs, block]
    slots: torch.Tensor,  # out [bs, block]
    prefix_lens: torch.Tensor,  # out [bs]
) -> None:
    """Fill the block of every request: last token + masks, at the positions after its prefix.

    A request that outran its row (it has already finished, and its result is still in flight) is moved
    back so that the block ends at `row_limit`: it then only touches slots of its own that nothing commits.
    """
    if seq_lens.is_cuda:
        launch = prepare_block_triton
    else:
        launch = prepare_block_torch
    launch(
        bonus_tokens, seq_lens, req_pool_indices, req_to_token, mask_token_id, row_limit,
        ids, positions, slots, prefix_lens,
    )  # fmt: skip


def prepare_block_torch(
    bonus_tokens, seq_lens, req_pool_indices, req_to_token, mask_token_id, row_limit, ids, positions, slots, prefix_lens
) -> None:  # fmt: skip
    """The definition of `prepare_block` in torch operations."""
    block = ids.shape[1]
    torch.clamp(seq_lens, max=row_limit - block, out=prefix_lens)
    ids.fill_(mask_token_id)
    ids[:, 0] = bonus_tokens
    torch.add(prefix_lens[:, None], torch.arange(block, device=ids.device), out=positions)
    slots.copy_(req_to_token[req_pool_indices.long()[:, None], positions])


def prepare_block_triton(
    bonus_tokens, seq_lens, req_pool_indices, req_to_token, mask_token_id, row_limit, ids, positions, slots, prefix_lens
) -> None:  # fmt: skip
    """`prepare_block` as one Triton launch, one program per request."""
    bs, block = ids.shape
    _prepare_block_kernel[(bs,)](
        bonus_tokens, seq_lens, req_pool_indices, req_to_token, ids, positions, slots, prefix_lens,
        req_to_token.stride(0), mask_token_id, row_limit,
        BLOCK=block, LANES=triton.next_power_of_2(block),
    )  # fmt: skip


@triton.jit
def _prepare_block_kernel(
    bonus_ptr, seq_lens_ptr, req_ptr, req_to_token_ptr, ids_ptr, positions_ptr, slots_ptr, prefix_ptr,
    row_stride, mask_token_id, row_limit,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    live = lane < BLOCK
    prefix = tl.minimum(tl.load(seq_lens_ptr + request).to(tl.int64), row_limit - BLOCK)
    row = tl.load(req_ptr + request).to(tl.int64) * row_stride
    position = prefix + lane
    token = tl.where(lane == 0, tl.load(bonus_ptr + request).to(tl.int64), mask_token_id)
    slot = tl.load(req_to_token_ptr + row + position, mask=live, other=0)
    out = request * BLOCK + lane
    tl.store(ids_ptr + out, token, mask=live)
    tl.store(positions_ptr + out, position, mask=live)
    tl.store(slots_ptr + out, slot.to(tl.int64), mask=live)
    tl.store(prefix_ptr + request, prefix)
