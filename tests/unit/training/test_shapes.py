"""The reference loop with ragged chains and best-first trees: trees, budgets, and exactness.

Tokens that are drawn with the noise of plain decoding and equal its are distributed as the target's.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.evaluate import load_pair
from training.pair import held_out_prompts
from training.reference import generate, plain_generate
from training.shapes import (
    PairRequest,
    Shape,
    decode,
    greedy,
    grow,
    gumbel,
    seeded,
    share,
)

LOGP = [0.0, -0.25, -0.5, -1.0, -1.0, -4.0, -math.inf]  # sums are exact, and often equal


@st.composite
def marginals(draw: Any, positions: int = 4, candidates: int = 3) -> np.ndarray:
    """[positions, K] float32, descending."""
    shape = draw(st.integers(1, positions)), draw(st.integers(1, candidates))
    values = draw(st.lists(st.sampled_from(LOGP), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return -np.sort(-np.array(values, np.float32).reshape(shape), axis=1)


@settings(deadline=None)
@given(marginals(), st.integers(1, 24), st.integers(1, 24))
def test_a_tree_has_the_likeliest_nodes_in_order(logp: np.ndarray, nodes: int, more: int) -> None:
    tree = grow(logp, nodes)
    every = [
        float(sum(logp[depth, rank] for depth, rank in enumerate(ranks)))
        for length in range(len(logp) + 1)
        for ranks in itertools.product(range(logp.shape[1]), repeat=length)
    ]
    assert [float(mass) for mass in tree.masses] == sorted(every, reverse=True)[:nodes]
    assert grow(logp, nodes + more).first(nodes) == tree, "the start of every larger one"


@settings(deadline=None)
@given(st.lists(marginals(5, 3), min_size=1, max_size=5), st.data())
def test_a_budget_goes_to_the_likeliest_nodes_of_the_batch(batch: list[np.ndarray], data: Any) -> None:
    trees = [grow(logp, 12) for logp in batch]
    masses = [tree.masses for tree in trees]
    rows = data.draw(st.integers(len(batch), sum(map(len, masses))))
    counts = share(masses, rows)
    assert sum(counts) == rows and min(counts) >= 1
    with pytest.raises(ValueError, match=rf"rows={len(batch) - 1}: expected {len(batch)}"):
        share(masses, len(batch) - 1)
    taken = [mass for of, count in zip(masses, counts, strict=True) for mass in of[1:count]]
    left = [mass for of, count in zip(masses, counts, strict=True) for mass in of[count:]]
    assert not taken or not left or min(taken) >= max(left)


LENGTH = 40
SHAPES = [Shape(16), Shape(5, 1, True), Shape(16, 8), Shape(7, 8, True)]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, list[list[int]]]:
    target, draft, tokenizer = load_pair()
    return target, draft, [tokenizer.encode(text) for text in held_out_prompts()[5:40:30]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_output_is_plain_decoding_token_for_token(pair: tuple[Any, Any, Any], shape: Shape) -> None:
    target, draft, prompts = pair
    requests = [PairRequest(target, draft, ids) for ids in prompts]
    decoded = decode(requests, shape, LENGTH, [greedy, greedy])
    for one, ids in zip(decoded, prompts, strict=True):
        assert one.ids[:LENGTH] == plain_generate(target, ids, LENGTH, ignore_eos=True)
        assert sum(one.accept_lengths) == len(one.ids) - 1
    both = zip(*(of.steps for of in decoded), strict=False)  # as long as both requests run
    rows = [sum(len(step.tokens) for step in steps) for steps in both]
    assert set(rows) == {2 * shape.rows}
    if shape == Shape(16):
        expected = [generate(target, draft, ids, LENGTH, ignore_eos=True).accept_lengths for ids in prompts]
        assert [one.accept_lengths for one in decoded] == expected
    elif shape.candidates > 1:
        paths = [node for one in decoded for step in one.steps for node in step.path]
        assert max(np.diff(paths)) > 1  # rows were moved


@pytest.mark.parametrize("shape", SHAPES[1::2], ids=str)
def test_seeded_output_is_plain_decoding_with_the_same_noise(pair: tuple[Any, Any, Any], shape: Shape) -> None:
    target, draft, prompts = pair
    draws = [seeded(0.8, gumbel(512, 320, seed)) for seed in (1, 2)]
    plain = decode([PairRequest(target, draft, ids) for ids in prompts], Shape(1), LENGTH, draws)
    found = decode([PairRequest(target, draft, ids) for ids in prompts], shape, LENGTH, draws)
    assert [one.ids[:LENGTH] for one in found] == [one.ids for one in plain]
    assert plain[0].ids != plain_generate(target, prompts[0], LENGTH, ignore_eos=True)
    assert max(found[0].accept_lengths) > 3
