"""Row statistics: the Triton kernels equal their torch twins."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_sglang.kernels.row_stats import (
    likely_logprobs_torch,
    likely_logprobs_triton,
    row_stats_torch,
    row_stats_triton,
)

ROWS = 6


def rows(vocab: int, scale: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = scale * torch.randn(ROWS, vocab + 3, generator=generator)[:, :vocab]  # padded: stride > vocab
    logits[0, 1:] = float("-inf")  # one token left
    logits[1, vocab // 2] = logits[1].max()  # a tie
    return logits.to(device), torch.tensor([1.0, 0.7, 2.0, 0.1, 1.0, 1.3]).to(device)


@pytest.mark.parametrize("vocab", [5, 4096, 9001])
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_the_kernels_find_the_argmax_the_normaliser_and_the_likely_tokens(vocab, scale, device, triton_runs):
    logits, temperatures = rows(vocab, scale, device)
    expected, got = row_stats_torch(logits, temperatures), row_stats_triton(logits, temperatures)
    assert torch.equal(got.argmax, expected.argmax)
    torch.testing.assert_close(got.log_normaliser, expected.log_normaliser)
    for at_most in (4, 1024):
        arguments = (logits, temperatures, expected.log_normaliser, at_most)
        assert torch.equal(likely_logprobs_triton(*arguments), likely_logprobs_torch(*arguments))


def test_likely_tokens_are_those_at_least_as_likely_as_one_in_so_many(device):
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]], device=device)
    one, none = torch.ones(1, device=device), torch.zeros(1, device=device)
    expected = [math.log(0.4), math.log(0.3), float("-inf"), float("-inf")]
    got = likely_logprobs_torch(probs.log(), one, none, 4)
    torch.testing.assert_close(got, torch.tensor([expected], device=device))
