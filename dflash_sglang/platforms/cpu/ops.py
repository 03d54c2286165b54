"""Torch forms of the GPU kernels that SGLang launches around speculative decoding."""

from __future__ import annotations

import torch


def block_slots(
    *,
    req_pool_indices: torch.Tensor,  # [bs] rows of req_to_token
    req_to_token: torch.Tensor,  # [requests, context] slot of each position
    start_offset: torch.Tensor,  # [bs] first position of each block
    end_offset: torch.Tensor,  # [bs] start_offset + draft_token_num
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Returns the slots of every request's block, `[bs * draft_token_num]` int64."""
    positions = start_offset[:, None] + torch.arange(draft_token_num, device=start_offset.device)
    return req_to_token[req_pool_indices.long()[:, None], positions.long()].reshape(-1).long()


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,  # [bs]
    req_to_token: torch.Tensor,  # [requests, context], written
    start_offset: torch.Tensor,  # [bs] first position written
    end_offset: torch.Tensor,  # [bs] one past the last position written
    out_cache_loc: torch.Tensor,  # [sum(end_offset - start_offset)] slots, request after request
    batch_size: int,
) -> None:
    """Writes newly allocated slots into their requests' rows. IndexError when a row is too short."""
    lengths = (end_offset - start_offset).long()
    rows = torch.repeat_interleave(req_pool_indices.long(), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    offset = torch.arange(rows.numel(), device=rows.device) - torch.repeat_interleave(first, lengths)
    columns = torch.repeat_interleave(start_offset.long(), lengths) + offset
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def softcap_(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """logits [..., vocab], written: kept within -cap .. cap, in their order."""
    return logits.div_(cap).tanh_().mul_(cap)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """seed, positions [rows], col_indices [columns] -> [rows, columns] from 0 to 2**32 - 1, by seed and position.

    Other numbers than the kernel's.
    """
    rows = torch.empty(len(positions), len(col_indices), dtype=torch.int64)
    for row, one, position in zip(rows, seed.tolist(), positions.tolist(), strict=True):
        row.random_(2**32, generator=torch.Generator().manual_seed((1_000_003 * one + position) % 2**63))
    return rows
