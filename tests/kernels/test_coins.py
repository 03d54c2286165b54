"""What the built-in worker is made to accept in benchmarks, by the rules of this package's forced acceptance."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_sglang.bench.forced.answers import TOKEN_ID, forced_by
from dflash_sglang.bench.forced.record import AcceptanceRecord

EASY, HARD = [0.9, 0.5, 0.8], [0.5, 0.0, 0.0]
REQUESTS = 50


def forced(source: Any) -> Any:
    """The two functions of the built-in worker's step, the first of which prepares nothing."""
    from bench.coins import Coins

    return Coins(json.dumps(source), prepare=lambda **block: None)


def step(coins: Any, requests: torch.Tensor, lens: torch.Tensor, block: int) -> list[int]:
    """Lengths that a step commits of requests [bs], rows of a table of REQUESTS + 1, with so many tokens [bs]."""
    candidates = torch.zeros(len(requests), block, dtype=torch.int64, device=lens.device)
    accepted, committed = (torch.empty_like(lens, dtype=torch.int32) for _ in range(2))
    bonus, new_lens = (torch.empty_like(lens, dtype=torch.int64) for _ in range(2))
    tokens = torch.empty_like(candidates)
    coins.prepare(req_pool_indices=requests, req_to_token=torch.empty(REQUESTS + 1, 1), block_ids_out=None)
    coins.accept(
        candidates=candidates, target_top1=candidates, prefix_lens=lens, accept_lens_out=accepted,
        commit_lens_out=committed, bonus_ids_out=bonus, out_tokens_out=tokens, new_seq_lens_out=new_lens,
    )  # fmt: skip
    assert torch.equal(committed, accepted + 1) and torch.equal(new_lens, lens + committed)
    assert bonus.unique().tolist() == tokens.unique().tolist() == [TOKEN_ID]
    return committed.tolist()


def test_each_request_commits_by_a_coin_of_its_own_and_the_profile_of_its_row(
    device: str, triton_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.7)
    rows = torch.arange(REQUESTS, device=device).flip(0)
    found = step(forced([EASY, HARD]), rows, torch.arange(REQUESTS, dtype=torch.int32, device=device), 4)
    ours = forced_by(json.dumps([EASY, HARD]), 4, REQUESTS + 1, device)
    coins = (ours.offsets[rows] + 0.7) % 1
    shares = torch.tensor([[0.9, 0.45, 0.36], [0.5, 0.0, 0.0]], device=device)
    assert found == (1 + (coins[:, None] < shares[rows % 2]).sum(dim=1)).tolist() and len(set(found)) == 4


@pytest.mark.parametrize("width", [4, 8, 16])
def test_the_built_in_worker_reads_on_in_a_record_as_it_commits(
    device: str, triton_runs: None, tmp_path: Path, width: int
) -> None:
    """Requests of other batches, in other rows, and new ones in the rows of those that ended."""
    rng = np.random.default_rng(width)
    ranks = rng.integers(0, 9, (331, 15), dtype=np.uint8) * (rng.random((331, 15)) < 0.2)
    record = AcceptanceRecord(np.zeros((331, 15, 8), np.float16), ranks.astype(np.uint8), np.zeros(331, np.uint8))
    np.savez(tmp_path / "record.npz", **record._asdict())
    coins = forced(source := {"record": str(tmp_path / "record.npz")})
    places = forced_by(json.dumps(source), width, REQUESTS + 1, "cpu").offsets.tolist()
    assert len(set(places)) == REQUESTS + 1
    committed = set[int]()
    for _ in range(12):
        rows = rng.permutation(REQUESTS + 1)[:8]
        lens = torch.from_numpy(rng.integers(1, 900, 8)).to(device)
        found = step(coins, torch.from_numpy(rows).to(device), lens, width)
        for row, length in zip(rows, found, strict=True):
            assert length == min(record.accepted[places[row]], width - 1) + 1
            places[row] = (places[row] + length) % 331
        committed |= set(found)
    assert len(committed) > 3 and max(committed) == width


def test_a_profile_that_is_too_short_ends_the_process_at_the_first_step(device: str) -> None:
    lens = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(SystemExit, match="DFLASH_SGLANG_FORCED=.*expected at least 15 probabilities"):
        step(forced([[0.5]]), lens.long(), lens, 16)
