"""Accept in one launch: how many tokens of each verified block are committed, and the bonus token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Accepted(NamedTuple):
    """What a verified block commits. The committed tokens of request b are `target_ids[b, :commit_lens[b]]`."""

    commit_lens: torch.Tensor  # [bs] int32, accepted proposals + 1
    bonus_tokens: torch.Tensor  # [bs] int64, the last committed token
    new_seq_lens: torch.Tensor  # [bs] int64, prefix + commit


def accept(
    tokens: torch.Tensor,  # [bs, block] last token + proposals
    target_ids: torch.Tensor,  # [bs, block] the target's token after each row
    prefix_lens: torch.Tensor,  # [bs]
) -> Accepted:
    """Commit the longest prefix of proposals that the target would have produced, and one token more.

    Row i proposes `tokens[:, i + 1]`, the target answers `target_ids[:, i]`; the first disagreement ends
    the prefix and the target's own token there is the bonus token. With `target_ids` drawn from the
    target's distribution this is exact rejection sampling of a point-mass proposal: a proposal x is taken
    with probability p(x), and otherwise the emitted token is distributed as p without x.
    """
    if tokens.is_cuda:
        return accept_triton(tokens, target_ids, prefix_lens)
    return accept_torch(tokens, target_ids, prefix_lens)


def accept_torch(tokens: torch.Tensor, target_ids: torch.Tensor, prefix_lens: torch.Tensor) -> Accepted:
    """The definition of `accept` in torch operations."""
    agrees = tokens[:, 1:] == target_ids[:, :-1]
    accepted = agrees.long().cumprod(dim=1).sum(dim=1)
    bonus_tokens = target_ids.gather(1, accepted[:, None]).squeeze(1)
    return Accepted((accepted + 1).int(), bonus_tokens.long(), prefix_lens.long() + accepted + 1)


def accept_triton(tokens: torch.Tensor, target_ids: torch.Tensor, prefix_lens: torch.Tensor) -> Accepted:
    """`accept` as one Triton launch, one program per request."""
    bs, block = tokens.shape
    out = Accepted(
        torch.empty(bs, dtype=torch.int32, device=tokens.device),
        torch.empty(bs, dtype=torch.int64, device=tokens.device),
        torch.empty(bs, dtype=torch.int64, device=tokens.device),
    )
    _accept_kernel[(bs,)](tokens, target_ids, prefix_lens, *out, BLOCK=block, LANES=triton.next_power_of_2(block))
    return out


@triton.jit
def _accept_kernel(
    tokens_ptr, target_ptr, prefix_ptr, commit_ptr, bonus_ptr, new_seq_lens_ptr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    compared = lane < BLOCK - 1
    proposal = tl.load(tokens_ptr + request * BLOCK + lane + 1, mask=compared, other=0)
    target = tl.load(target_ptr + request * BLOCK + lane, mask=lane < BLOCK, other=0)
    disagrees = (proposal != target) | (lane >= BLOCK - 1)
    accepted = tl.min(tl.where(disagrees, lane, BLOCK - 1), axis=0)
    bonus = tl.sum(tl.where(lane == accepted, target.to(tl.int64), 0), axis=0)
    tl.store(commit_ptr + request, accepted + 1)
    tl.store(bonus_ptr + request, bonus)
    tl.store(new_seq_lens_ptr + request, tl.load(prefix_ptr + request).to(tl.int64) + accepted + 1)
