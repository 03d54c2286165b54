"""Coins that decide what the built-in worker accepts in benchmarks: the rule of this package's forced accept."""

from __future__ import annotations

import random

import pytest
import torch

from dflash_sglang.kernels.block.accept import COIN_BITS, GOLDEN
from dflash_sglang.verify.simulate import FIXED_TOKEN_ID

PROFILE, SHARES = [0.9, 0.5, 0.8], [0.9, 0.45, 0.36]
COIN, REQUESTS = 12345, 50


def test_each_request_commits_by_a_coin_of_its_own(
    device: str, triton_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.coins import Coins

    monkeypatch.setattr(random, "getrandbits", lambda bits: COIN)
    block = len(PROFILE) + 1
    candidates = torch.zeros(REQUESTS, block, dtype=torch.int64, device=device)
    lens = torch.arange(REQUESTS, dtype=torch.int32, device=device)
    out = {
        "accept_lens_out": torch.empty_like(lens),
        "commit_lens_out": torch.empty_like(lens),
        "bonus_ids_out": torch.empty_like(candidates[:, 0].contiguous()),
        "out_tokens_out": torch.empty_like(candidates),
        "new_seq_lens_out": torch.empty_like(candidates[:, 0].contiguous()),
    }
    Coins(PROFILE)(candidates=candidates, target_top1=candidates, prefix_lens=lens, **out)
    coins = (COIN + torch.arange(REQUESTS) * GOLDEN) % (1 << COIN_BITS)
    below = coins[:, None].double() / (1 << COIN_BITS) < torch.tensor(SHARES, dtype=torch.float64)
    accepted = below.sum(dim=1)
    assert set(accepted.tolist()) == {0, 1, 2, 3}
    found = {name: tensor.cpu() for name, tensor in out.items()}
    assert found["accept_lens_out"].tolist() == accepted.tolist()
    assert found["commit_lens_out"].tolist() == (accepted + 1).tolist()
    assert found["new_seq_lens_out"].tolist() == (torch.arange(REQUESTS) + accepted + 1).tolist()
    assert (
        found["bonus_ids_out"].unique().tolist() == found["out_tokens_out"].unique().tolist() == [FIXED_TOKEN_ID]
    )
