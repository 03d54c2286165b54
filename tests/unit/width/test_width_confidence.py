"""What a step commits by how many rows it verifies, learnt from the draft's probabilities and what came true."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_sglang.width.confidence import BINS, EDGES, MIDDLES, Confidence, _bins

WIDTHS = (1, 4, 16)


def test_chances_are_sorted_into_bins_the_likeliest_first() -> None:
    assert _bins(np.array([1.0, 0.99, 0.98, 0.5, 0.021, 0.02, 0.0])).tolist() == [
        0,
        0,
        1,
        8,
        BINS - 2,
        BINS - 2,
        BINS - 1,
    ]
    assert (np.diff(MIDDLES) < 0).all() and (_bins(MIDDLES) == np.arange(BINS)).all() and len(EDGES) == BINS - 1


def batch(generator: np.random.Generator, n: int, sure: float) -> tuple[np.ndarray, np.ndarray]:
    """logprobs [n, 15] of a draft whose chances are what it says to the power `sure`, and accepted proposals."""
    said = generator.beta(4.0, 1.0, (n, 15))
    return np.log(said), (generator.random((n, 15)) < said**sure).cumprod(axis=1).sum(axis=1)


@pytest.mark.parametrize("sure", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("rows", [None, 6])
def test_what_steps_commit_is_learnt_whatever_the_draft_thinks_of_itself(sure: float, rows: int | None) -> None:
    generator, confidence = np.random.default_rng(0), Confidence(WIDTHS)
    tokens = {2: 0.0, 5: 0.0, 9: 0.0, 16: 0.0}
    for step in range(400):
        logprobs, accepted = batch(generator, 64, sure)
        survival = logprobs.cumsum(axis=1)
        for mean in tokens if step >= 200 else ():
            chosen = np.argsort(-survival, axis=None)[: 64 * (mean - 1)] // 15
            lens = 1 + np.bincount(chosen, minlength=64)
            tokens[mean] += (1 + np.minimum(lens - 1, accepted)).mean() / 200
        lens = None
        if rows is not None:
            lens = 1 + np.bincount(np.argsort(-survival, axis=None)[: 64 * (rows - 1)] // 15, minlength=64)
            accepted = np.minimum(accepted, lens - 1)
        confidence.observe(logprobs, accepted, lens)
    known = [mean for mean in tokens if rows is None or mean <= rows]
    got = confidence.committed(2, np.array(known, float))
    assert got == pytest.approx([tokens[mean] for mean in known], rel=0.04)


def test_a_narrower_block_has_the_first_positions_of_a_wider_one() -> None:
    confidence = Confidence(WIDTHS)
    logprobs = np.tile(np.log([0.995, 0.995, 0.995, *[0.5] * 12]), (8, 1))
    for _ in range(400):
        confidence.observe(logprobs, np.full(8, 3), None)
    assert confidence.committed(1, np.array([1.0, 2.0, 4.0])) == pytest.approx([1.0, 2.0, 4.0], abs=0.02)
    assert confidence.committed(2, np.array([4.0, 16.0])) == pytest.approx([4.0, 4.0], abs=0.05)
    assert confidence.committed(0, np.array([1.0])).tolist() == [1.0]


def test_positions_that_are_not_drafted_keep_what_was_known() -> None:
    confidence = Confidence(WIDTHS)
    wide = confidence.committed(2, np.array([16.0]))[0] - confidence.committed(1, np.array([4.0]))[0]
    for _ in range(200):
        confidence.observe(np.full((4, 3), np.log(0.999)), np.full(4, 3), None)
    known = confidence.committed(2, np.array([16.0]))[0] - confidence.committed(1, np.array([4.0]))[0]
    assert known == pytest.approx(wide, rel=0.05) and confidence.committed(1, np.array([4.0]))[0] > 3.9


def test_nothing_observed_is_the_usual_acceptance() -> None:
    got = Confidence(WIDTHS).committed(2, np.array([16.0]))[0]
    assert got == pytest.approx(1 + sum(0.8**k for k in range(1, 16)), rel=0.05)
