"""Accept lengths that are forced instead of real, for measurements without a trained draft."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from dflash_sglang.compat import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    check_simulate_acc_token_mode,
)
from dflash_sglang.kernels.accept import COIN_BITS, Forced

FIXED_TOKEN_ID = 100  # what SGLang's workers emit in its token mode "fixed"


def forced_acceptance(block_size: int, profile: Sequence[float] | None, device: str) -> Forced | None:
    """What forces accept lengths in this process: SGLANG_SIMULATE_ACC_LEN, `simulated_acceptance`, or None.

    profile: the probability that proposal 1, 2, ... is accepted once those before it are; each request draws its
    own length. SGLang's variable gives all requests of a step one length, as its workers do.
    Raises ValueError for an unknown token mode or method, for both settings at once, and for a profile that is
    shorter than the block's proposals.
    """
    check_simulate_acc_token_mode()
    if SIMULATE_ACC_LEN <= 0 and profile is None:
        return None
    if SIMULATE_ACC_LEN > 0 and profile is not None:
        raise ValueError(
            f"SGLANG_SIMULATE_ACC_LEN={SIMULATE_ACC_LEN}: expected unset beside simulated_acceptance={profile}."
        )
    proposals = block_size - 1
    if profile is None:
        survival = _of_mean(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, proposals)
    elif len(profile) < proposals:
        raise ValueError(
            f"simulated_acceptance={profile}: expected at least {proposals} probabilities, one for each proposal "
            f"of a block of {block_size}."
        )
    else:
        survival = list(itertools.accumulate(profile[:proposals], lambda a, b: a * b))
    coins = torch.tensor([round(share * (1 << COIN_BITS)) for share in survival], device=device)
    fixed = None if SIMULATE_ACC_TOKEN_MODE == "real-draft-token" else FIXED_TOKEN_ID
    return Forced(coins, alike=profile is None, token_id=fixed)


def _of_mean(length: float, method: str, proposals: int) -> list[float]:
    """P(more than i proposals are accepted), i = 0, 1, ..., of the lengths that SGLang's `method` draws."""
    counts = range(1, proposals + 1)  # committed without the proposal in question
    if method == "multinomial":  # a normal distribution of deviation 1, rounded
        return [0.5 * math.erfc((count + 0.5 - length) / math.sqrt(2)) for count in counts]
    if method == "match-expected":
        mean = min(max(length, 1.0), proposals + 1.0)
        return [min(max(mean - count, 0.0), 1.0) for count in counts]
    raise ValueError(
        f"SGLANG_SIMULATE_ACC_METHOD={method!r}: expected 'multinomial' or 'match-expected'. Correct it."
    )
