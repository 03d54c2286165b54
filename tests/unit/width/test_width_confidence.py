"""What a step commits by how many rows it verifies, learnt from the draft's probabilities and what came true."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_sglang.width.confidence import BINS, EDGES, MIDDLES, Confidence, _bins

BLOCK = 16


def committed(confidence: Confidence, width: int, rows: float) -> float:
    """Tokens of a step of one request, of whose blocks so many rows on average are verified."""
    counts = confidence._counts[: width - 1].sum(axis=0)
    share = np.interp(rows, *confidence.shares([width])[0]) if width > 1 else 0.0
    return float(1.0 + (counts * confidence.truth).sum() * share)


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
    generator, confidence = np.random.default_rng(0), Confidence(BLOCK)
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
    got = [committed(confidence, 16, mean) for mean in known]
    assert got == pytest.approx([tokens[mean] for mean in known], rel=0.04)


def test_a_narrower_block_has_the_first_positions_of_a_wider_one() -> None:
    confidence = Confidence(BLOCK)
    logprobs = np.tile(np.log([0.995, 0.995, 0.995, *[0.5] * 12]), (8, 1))
    for _ in range(400):
        confidence.observe(logprobs, np.full(8, 3), None)
    assert [committed(confidence, 4, rows) for rows in (1, 2, 4)] == pytest.approx([1.0, 2.0, 4.0], abs=0.02)
    assert [committed(confidence, 16, rows) for rows in (4, 16)] == pytest.approx([4.0, 4.0], abs=0.05)


def test_positions_that_are_not_drafted_keep_what_was_known() -> None:
    confidence = Confidence(BLOCK)
    wide = committed(confidence, 16, 16) - committed(confidence, 4, 4)
    for _ in range(200):
        confidence.observe(np.full((4, 3), np.log(0.999)), np.full(4, 3), None)
    known = committed(confidence, 16, 16) - committed(confidence, 4, 4)
    assert known == pytest.approx(wide, rel=0.05) and committed(confidence, 4, 4) > 3.9


def test_nothing_observed_is_the_usual_acceptance() -> None:
    got = committed(Confidence(BLOCK), 16, 16)
    assert got == pytest.approx(1 + sum(0.8**k for k in range(1, 16)), rel=0.05)


def test_what_is_beyond_a_requests_limit_is_neither_verified_nor_promised() -> None:
    confidence = Confidence(BLOCK)
    logprobs = np.array([[-0.1, -0.1, *[-np.inf] * 13]])
    chances = confidence.observe(logprobs, np.array([2]), None)
    assert chances.shape == (1, 15) and (chances[0, :2] > 0.8).all() and not chances[0, 2:].any()
    told = confidence.snapshot()
    assert sum(told["verified"]) == 2 and sum(told["accepted"]) == 2
    assert sum(told["expected"]) == pytest.approx(np.exp(-0.1) + np.exp(-0.2))


def step_of_trees(chance: float, nodes: int, rest: float) -> tuple[np.ndarray, np.ndarray]:
    """logprobs [1, 15], mass [1, nodes]: nodes beside the likeliest path have `rest`."""
    logprobs = np.full((1, 15), np.log(chance))
    mass = np.array([[0.0, *logprobs[0].cumsum()[:7], *[np.log(rest)] * (nodes - 8)]])
    return logprobs, mass


def test_trees_are_known_by_their_masses_and_every_larger_one_tells_of_the_smaller() -> None:
    confidence = Confidence(BLOCK, [16, 32, 64])
    usual = {nodes: confidence.of_tree(nodes) for nodes in (16, 32, 64)}
    assert usual == pytest.approx({16: 1.15, 32: 1.26, 64: 1.36})
    logprobs, mass = step_of_trees(0.8, 32, 0.05)
    chain, grown = np.exp(logprobs.cumsum()).sum(), np.exp(mass[0, 1:]).cumsum()
    promised = [grown[14] / chain, grown[30] / chain]
    for _ in range(2000):  # what comes true is what the chain's calibration and the masses promise
        chances = confidence.observe_trees(logprobs, mass, np.array([0]))
        confidence._of_trees[0] += chances.sum() * promised[1]
    assert [confidence.of_tree(16), confidence.of_tree(32)] == pytest.approx(promised, rel=0.02)
    assert confidence.of_tree(64) == pytest.approx(usual[64], rel=0.1), "nothing is known of its masses"


@pytest.mark.parametrize("accepted", [2, 4, 6])
def test_trees_that_commit_other_than_their_masses_say_are_corrected(accepted: int) -> None:
    confidence = Confidence(BLOCK, [32])
    logprobs, mass = step_of_trees(0.8, 32, 0.05)
    chain = confidence.observe(logprobs, np.array([4]), None).sum()
    for _ in range(4000):
        chain = confidence.observe_trees(logprobs, mass, np.array([accepted])).sum()
    assert confidence.of_tree(32) * chain == pytest.approx(accepted, rel=0.05)
