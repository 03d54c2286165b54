"""The target's tokens of a block: adjusted and drawn row by row as decode steps, and exact after the accept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang.kernels.accept import accept

VOCAB, BLOCK, REQUESTS = 5, 3, 20_000


def sampling_info(requests: int, **fields: Any) -> Any:
    from dflash_sglang.compat import SamplingBatchInfo

    defaults = dict(
        temperatures=torch.ones(requests, 1),
        top_ps=torch.ones(requests),
        top_ks=torch.full((requests,), VOCAB),
        min_ps=torch.zeros(requests),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCAB,
        device="cpu",
    )
    return SamplingBatchInfo(**{**defaults, **fields})


class Multinomial:
    """Stands in for SGLang's sampler: draws from softmax(logits / temperature), and keeps what it was given."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, logits_output: Any, info: Any, **kwargs: Any) -> Tensor:
        self.info, self.positions = info, kwargs["positions"]
        probabilities = (logits_output.next_token_logits / info.temperatures).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)


@pytest.mark.parametrize("proposal", ["the likeliest", "the unlikeliest"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_committed_tokens_follow_the_targets_distribution_whatever_is_proposed(proposal, temperature):
    """A Markov target: the joint distribution of the next two tokens, by chi-square (0.001, 24 degrees)."""
    from dflash_sglang.verify.sampling import choose_tokens

    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8))  # logits after each token
    drafted = table.argmax(-1) if proposal == "the likeliest" else table.argmin(-1)
    info = sampling_info(REQUESTS, temperatures=torch.full((REQUESTS, 1), temperature))
    sampler = Multinomial()

    def step(last: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.stack([last, drafted[last], drafted[drafted[last]]], dim=1)
        logits = table[tokens].view(-1, VOCAB).clone()
        positions = torch.arange(REQUESTS * BLOCK)
        target_ids = choose_tokens(logits, info, positions, sampler, BLOCK)
        return target_ids, accept(tokens, target_ids, torch.zeros(REQUESTS, dtype=torch.long)).commit_lens

    start = torch.zeros(REQUESTS, dtype=torch.long)
    first_block, commit = step(start)
    first = first_block[:, 0]
    second_block, _ = step(first)  # the next step of the requests that committed one token
    second = torch.where(commit >= 2, first_block[:, 1], second_block[:, 0])
    assert 0 < int((commit >= 2).sum()) < REQUESTS, "both ways of getting a second token are taken"
    conditional = (table / temperature).softmax(-1)
    expected = (conditional[0][:, None] * conditional).flatten() * REQUESTS
    observed = torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB)
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 51.2


def test_every_row_of_a_block_has_its_requests_parameters():
    from dflash_sglang.verify.sampling import choose_tokens

    sampler = Multinomial()
    info = sampling_info(
        2,
        temperatures=torch.tensor([[0.5], [2.0]]),
        top_ps=torch.tensor([0.9, 0.8]),
        top_ks=torch.tensor([3, 4]),
        min_ps=torch.tensor([0.1, 0.2]),
        sampling_seed=torch.tensor([7, 9]),
    )
    positions = torch.tensor([10, 11, 12, 40, 41, 42])
    choose_tokens(torch.zeros(6, VOCAB), info, positions, sampler, BLOCK)
    rows = sampler.info
    assert rows.temperatures.flatten().tolist() == [0.5] * 3 + [2.0] * 3
    assert rows.top_ks.tolist() == [3] * 3 + [4] * 3
    assert rows.sampling_seed.tolist() == [7] * 3 + [9] * 3
    torch.testing.assert_close(rows.top_ps, torch.tensor([0.9] * 3 + [0.8] * 3))
    torch.testing.assert_close(rows.min_ps, torch.tensor([0.1] * 3 + [0.2] * 3))
    assert sampler.positions is positions
    assert len(rows) == 6


def test_penalties_and_bias_reach_every_row_of_their_request_only():
    from dflash_sglang.verify.sampling import adjust_logits

    additive, bias = torch.zeros(2, VOCAB), torch.zeros(2, VOCAB)
    additive[0, 1], bias[1, 2] = -3.0, 5.0
    scaling = torch.ones(2, VOCAB)
    scaling[1, 0] = 2.0
    info = sampling_info(2, acc_additive_penalties=additive, acc_scaling_penalties=scaling, logit_bias=bias)
    logits = torch.ones(6, VOCAB)
    adjust_logits(logits, info, None, BLOCK)
    first, second = logits.view(2, BLOCK, VOCAB)
    assert first.tolist() == [[1.0, -2.0, 1.0, 1.0, 1.0]] * BLOCK
    assert second.tolist() == [[0.5, 1.0, 6.0, 1.0, 1.0]] * BLOCK
