"""Accept lengths that are forced instead of real, for measurements without a trained draft."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import torch

from dflash_sglang.kernels.block.accept import COIN_BITS, Forced
from dflash_sglang.settings.plugin_config import Profile
from dflash_sglang.sglang_names.scheduler import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    check_simulate_acc_token_mode,
)
from dflash_sglang.startup.facts import LoadError

FIXED_TOKEN_ID = 100  # what SGLang's workers emit in its token mode "fixed"


def forced_acceptance(block_size: int, profiles: Sequence[Profile] | None, device: str) -> Forced | None:
    """What forces accept lengths in this process: SGLANG_SIMULATE_ACC_LEN, `simulated_acceptance`, or None.

    profiles: see `PluginConfig.simulated_acceptance`; each request draws its own length. SGLang's variable gives
    all requests of a step one length, as its workers do.
    Raises ValueError for an unknown token mode or method, for both settings at once, and for a profile that is
    shorter than the block's proposals.
    """
    check_simulate_acc_token_mode()
    if SIMULATE_ACC_LEN <= 0 and profiles is None:
        return None
    if SIMULATE_ACC_LEN > 0 and profiles is not None:
        raise LoadError(
            f"SGLANG_SIMULATE_ACC_LEN={SIMULATE_ACC_LEN}: expected unset beside simulated_acceptance={profiles}."
        )
    proposals = block_size - 1
    if profiles is None:
        survival = [_of_mean(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, proposals)]
    else:
        survival = [_of_profile(profile, block_size) for profile in profiles]
    coins = torch.tensor([[round(share * (1 << COIN_BITS)) for share in row] for row in survival], device=device)
    fixed = None if SIMULATE_ACC_TOKEN_MODE == "real-draft-token" else FIXED_TOKEN_ID
    return Forced(coins, alike=profiles is None, token_id=fixed)


def _of_profile(profile: Profile, block_size: int) -> list[float]:
    """P(proposals 1 to i are accepted), i = 1, 2, ..., of a block."""
    if len(profile) < block_size - 1:
        raise LoadError(
            f"simulated_acceptance={list(profile)}: expected at least {block_size - 1} probabilities, one for "
            f"each proposal of a block of {block_size}."
        )
    return list(itertools.accumulate(profile[: block_size - 1], operator.mul))


def _of_mean(length: float, method: str, proposals: int) -> list[float]:
    """P(more than i proposals are accepted), i = 0, 1, ..., of the lengths that SGLang's `method` draws."""
    counts = range(1, proposals + 1)  # committed without the proposal in question
    if method == "multinomial":  # a normal distribution of deviation 1, rounded
        return [0.5 * math.erfc((count + 0.5 - length) / math.sqrt(2)) for count in counts]
    if method == "match-expected":
        mean = min(max(length, 1.0), proposals + 1.0)
        return [min(max(mean - count, 0.0), 1.0) for count in counts]
    raise LoadError(
        f"SGLANG_SIMULATE_ACC_METHOD={method!r}: expected 'multinomial' or 'match-expected'. Correct it."
    )
