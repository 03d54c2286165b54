"""What `bench.confidence` judges predictors by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench import confidence


def test_the_likeliest_rows_of_a_batch_are_verified_and_commit_what_is_accepted() -> None:
    survival = [np.array([[0.9, 0.8, 0.1]]), np.array([[0.5, 0.4, 0.3], [0.6, 0.2, 0.1]])]
    accepted = [np.array([3]), np.array([1, 0])]
    # Together 1 + 2 * 1 rows beside those of the last tokens, of the first prompt both; alone, the first proposal.
    assert confidence.committed(survival, accepted, 2) == pytest.approx((3 + 1 + 1) / 3)
    assert confidence.committed(survival, accepted, 4) == pytest.approx((4 + 2 + 1) / 3)


def test_nats_are_those_of_proposals_up_to_the_first_that_is_rejected() -> None:
    chances = [np.array([[0.5, 0.25, 0.9], [0.5, 0.5, 0.8]])]
    accepted = [np.array([1, 3])]
    decided = [0.5, 0.75, 0.5, 0.5, 0.8]
    assert confidence.nats(chances, accepted) == pytest.approx(-np.log(decided).mean())


def test_chances_come_from_the_other_half_of_the_prompts() -> None:
    generator = np.random.default_rng(0)
    features, accepted = [], []
    for prompt in range(4):
        of = generator.normal(size=(4000, 1, 1))
        taken = generator.random((4000, 1)) < 1 / (1 + np.exp(-(2 * of[..., 0] * (-1) ** prompt - 1)))
        features.append(of)
        accepted.append(taken[:, 0].astype(int))
    for prompt, chances in enumerate(confidence.fitted(features, accepted)):
        other = 1 / (1 + np.exp(-(-2 * features[prompt][..., 0] * (-1) ** prompt - 1)))
        assert chances == pytest.approx(other, abs=0.06)


def test_a_regression_finds_the_chances_that_outcomes_were_drawn_with() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(20000, 2, generator=generator)
    chances = (features @ torch.tensor([1.5, -0.5]) + 0.25).sigmoid()
    outcomes = (torch.rand(20000, generator=generator) < chances).float()
    assert confidence.regression(features, outcomes).tolist() == pytest.approx([1.5, -0.5, 0.25], abs=0.1)


def test_history_is_what_the_policy_has_learnt_before_a_step() -> None:
    easy, hard = np.full(40, 15), np.zeros(40, int)
    of_easy, of_hard = confidence.from_history([easy, hard], 15)
    assert of_easy.shape == of_hard.shape == (40, 15)
    assert (of_easy[0] == of_hard[0]).all() and of_easy[39, 0] > 0.9 and of_hard[39, 0] < 0.3
