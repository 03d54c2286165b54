"""Accept lengths that are forced instead of real, for measurements without a trained draft."""

from __future__ import annotations

import itertools
import math
import operator
from pathlib import Path

import torch

from dflash_sglang.kernels.block.accept import COIN_BITS, GOLDEN, Forced, Recorded
from dflash_sglang.settings.plugin_config import Profile, SimulatedAcceptance, Texts
from dflash_sglang.sglang_names.scheduler import (
    SIMULATE_ACC_LEN,
    SIMULATE_ACC_METHOD,
    SIMULATE_ACC_TOKEN_MODE,
    check_simulate_acc_token_mode,
)
from dflash_sglang.startup.facts import LoadError
from dflash_sglang.verify.record import AcceptanceRecord, check_width
from dflash_sglang.verify.simulated_texts import SimulatedTexts

FIXED_TOKEN_ID = 100  # what SGLang's workers emit in its token mode "fixed"


def forced_acceptance(
    block_size: int, simulated: SimulatedAcceptance | None, rows: int, device: str
) -> Forced | Recorded | SimulatedTexts | None:
    """What forces accept lengths in this process: SGLANG_SIMULATE_ACC_LEN, `simulated_acceptance`, or None.

    simulated: see `PluginConfig.simulated_acceptance`; each request has a length of its own. SGLang's variable
    gives all requests of a step one length, as its workers do. rows: of req_to_token, or more.
    Raises ValueError for an unknown token mode or method, for both settings at once, for a profile or a record
    that is shorter than the block's proposals, and for a file that is no record.
    """
    check_simulate_acc_token_mode()
    if SIMULATE_ACC_LEN <= 0 and simulated is None:
        return None
    if SIMULATE_ACC_LEN > 0 and simulated is not None:
        raise LoadError(
            f"SGLANG_SIMULATE_ACC_LEN={SIMULATE_ACC_LEN}: expected unset beside simulated_acceptance={simulated}."
        )
    fixed = None if SIMULATE_ACC_TOKEN_MODE == "real-draft-token" else FIXED_TOKEN_ID
    if isinstance(simulated, Texts):
        return SimulatedTexts(simulated.path, block_size, rows, device)
    if isinstance(simulated, Path):
        return _of_record(simulated, block_size, rows, device, fixed)
    if simulated is None:
        survival = [_of_mean(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, block_size - 1)]
    else:
        survival = [_of_profile(profile, block_size) for profile in simulated]
    coins = torch.tensor([[round(share * (1 << COIN_BITS)) for share in row] for row in survival], device=device)
    return Forced(coins, alike=simulated is None, token_id=fixed)


def _of_record(path: Path, block_size: int, rows: int, device: str, token_id: int | None) -> Recorded:
    """The likeliest tokens of a record, and the places in it from which rows of req_to_token start."""
    record, proposals = AcceptanceRecord.load(path), block_size - 1
    check_width(record, block_size, path)
    candidates = torch.from_numpy(record.logprobs[:, :proposals].astype("float32")).to(device)
    ranks = torch.from_numpy(record.ranks[:, :proposals].astype("int64")).to(device)
    spread = torch.arange(rows) * GOLDEN % (1 << COIN_BITS) * len(record.ranks) >> COIN_BITS
    accepted = torch.from_numpy(record.accepted)
    return Recorded(accepted.to(device), spread.to(device), token_id, candidates, ranks)


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
