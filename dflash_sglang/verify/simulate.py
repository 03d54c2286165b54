"""SGLANG_SIMULATE_ACC_LEN: a drawn accept length in place of the real one, for benchmarks of step time."""

from __future__ import annotations

import torch

from dflash_sglang.compat import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    check_simulate_acc_token_mode,
    sample_simulated_acc_len,
)
from dflash_sglang.kernels.accept import Accepted

FIXED_TOKEN_ID = 100  # what SGLang's workers emit in its token mode "fixed"


def simulation_enabled() -> bool:
    """Whether accept lengths are forced in this process. Raises ValueError on an unknown token mode."""
    check_simulate_acc_token_mode()
    return SIMULATE_ACC_LEN > 0


def simulate(
    tokens: torch.Tensor,  # [bs, block] last committed token + proposals
    target_ids: torch.Tensor,  # [bs, block]
    prefix_lens: torch.Tensor,  # [bs]
) -> tuple[torch.Tensor, Accepted]:
    """(target_ids, accepted) of a step in which every request commits the same drawn length."""
    bs, block_size = tokens.shape
    commit = sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, block_size)
    if SIMULATE_ACC_TOKEN_MODE == "real-draft-token":
        out = target_ids.clone()
        out[:, : commit - 1] = tokens[:, 1:commit]
    else:
        out = torch.full_like(target_ids, FIXED_TOKEN_ID)
    commit_lens = torch.full((bs,), commit, dtype=torch.int32, device=tokens.device)
    return out, Accepted(commit_lens, out[:, commit - 1].contiguous(), prefix_lens + commit)
