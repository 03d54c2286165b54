"""What the built-in worker is made to accept in benchmarks, by the rules of this package's forced accept."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.kernels.block.accept import COIN_BITS, GOLDEN
from dflash_sglang.verify.acceptance import Acceptor
from dflash_sglang.verify.record import AcceptanceRecord
from dflash_sglang.verify.simulate import FIXED_TOKEN_ID

EASY, HARD = [0.9, 0.5, 0.8], [0.5, 0.0, 0.0]
SHARES = torch.tensor([[0.9, 0.45, 0.36], [0.5, 0.0, 0.0]], dtype=torch.float64)
COIN, REQUESTS = 12345, 50


def forced(simulated: Any) -> Any:
    """The two functions of the built-in worker's step, the first of which prepares nothing."""
    from bench.coins import Coins

    return Coins(simulated, prepare=lambda **block: None)


def step(coins: Any, requests: torch.Tensor, lens: torch.Tensor, block: int) -> dict[str, torch.Tensor]:
    """requests [bs], rows of a table of REQUESTS + 1, with so many tokens [bs] -> what the step writes."""
    candidates = torch.zeros(len(requests), block, dtype=torch.int64, device=lens.device)
    out = {
        "accept_lens_out": torch.empty_like(lens, dtype=torch.int32),
        "commit_lens_out": torch.empty_like(lens, dtype=torch.int32),
        "bonus_ids_out": torch.empty_like(lens, dtype=torch.int64),
        "out_tokens_out": torch.empty_like(candidates),
        "new_seq_lens_out": torch.empty_like(lens, dtype=torch.int64),
    }
    coins.prepare(req_pool_indices=requests, req_to_token=torch.empty(REQUESTS + 1, 1), block_ids_out=None)
    coins.accept(candidates=candidates, target_top1=candidates, prefix_lens=lens, **out)
    return {name: tensor.cpu() for name, tensor in out.items()}


def test_each_request_commits_by_a_coin_of_its_own_and_the_profile_of_its_row(
    device: str, triton_runs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "getrandbits", lambda bits: COIN)
    lens = torch.arange(REQUESTS, dtype=torch.int32, device=device)
    rows = torch.arange(REQUESTS, device=device).flip(0)
    found = step(forced([EASY, HARD]), rows, lens, len(EASY) + 1)
    coins = (COIN + torch.arange(REQUESTS) * GOLDEN) % (1 << COIN_BITS)
    accepted = (coins[:, None].double() / (1 << COIN_BITS) < SHARES[rows.cpu() % 2]).sum(dim=1)
    assert set(accepted.tolist()) == {0, 1, 2, 3}
    assert found["accept_lens_out"].tolist() == accepted.tolist()
    assert found["commit_lens_out"].tolist() == (accepted + 1).tolist()
    assert found["new_seq_lens_out"].tolist() == (torch.arange(REQUESTS) + accepted + 1).tolist()
    assert (
        found["bonus_ids_out"].unique().tolist() == found["out_tokens_out"].unique().tolist() == [FIXED_TOKEN_ID]
    )


@pytest.mark.parametrize("width", [4, 8, 16])
def test_the_built_in_worker_reads_a_record_as_ours_does(
    device: str, triton_runs: None, tmp_path: Path, width: int
) -> None:
    """Requests of other batches, in other rows, and new ones in the rows of those that ended."""
    rng = np.random.default_rng(width)
    ranks = rng.integers(0, 9, (331, 15), dtype=np.uint8) * (rng.random((331, 15)) < 0.2)
    logprobs, prompts = np.zeros((331, 15, 8), np.float16), np.zeros(331, np.uint8)
    path = tmp_path / "record.npz"
    np.savez(path, **AcceptanceRecord(logprobs, ranks.astype(np.uint8), prompts)._asdict())
    coins, slots = forced(path), StepSlots(REQUESTS + 1, width, device)
    ours = Acceptor(slots, path)
    lens = torch.zeros(REQUESTS + 1, dtype=torch.int64, device=device)
    committed = []
    for _ in range(12):
        rows = torch.from_numpy(rng.permutation(REQUESTS + 1)[:8]).to(device)
        new = rows[:2]
        lens[new] = torch.from_numpy(rng.integers(1, 900, 2)).to(device)
        ours.start(new, torch.zeros_like(new), lens[new])
        found = step(coins, rows, lens[rows], width)
        slots.current.copy_(torch.tensor(slots.next()))
        blocks = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        ours.accept(blocks, blocks, lens[rows], rows)
        assert slots.outcome(len(rows), width).commit_lens.tolist() == found["commit_lens_out"].tolist()
        committed += found["commit_lens_out"].tolist()
        lens[rows] = found["new_seq_lens_out"].to(device)
    assert len(set(committed)) > 3 and max(committed) == min(width, 16)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"record": "/nowhere.npz"}', "simulated_acceptance=.*/nowhere.npz.*expected"),
        ("[0.5", "is not|Expecting"),
        ("[0.5, 2]", "simulated_acceptance=.*expected a list of probabilities"),
    ],
)
def test_what_cannot_be_forced_ends_the_process(source: str, message: str) -> None:
    from bench.coins import coins_of

    with pytest.raises(SystemExit, match=message):
        coins_of(source)


def test_a_profile_that_is_too_short_ends_the_process_at_the_first_step(device: str) -> None:
    lens = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.raises(SystemExit, match="COINS: .*expected at least 15 probabilities"):
        step(forced([[0.5]]), lens.long(), lens, 16)
