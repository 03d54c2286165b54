"""The reference loop with ragged chains and best-first trees: trees, budgets, and exactness."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_sglang.kernels.block.share_rows import share_rows_torch
from dflash_sglang.pair import held_out_prompts
from tests.unit.verify.test_sampling import chi_square_bound
from training.evaluate import load_pair
from training.reference import generate, plain_generate
from training.shapes import (
    Marginals,
    PairRequest,
    Shape,
    Tree,
    ancestors,
    decode,
    greedy,
    grow,
    gumbel,
    likeliest,
    seeded,
    share,
    walk,
)

LOGP = [0.0, -0.25, -0.5, -1.0, -1.0, -4.0, -math.inf]  # sums are exact, and often equal


@st.composite
def marginals(draw: Any, positions: int = 4, candidates: int = 3) -> np.ndarray:
    """[positions, K] float32, descending."""
    shape = draw(st.integers(1, positions)), draw(st.integers(1, candidates))
    values = draw(st.lists(st.sampled_from(LOGP), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return -np.sort(-np.array(values, np.float32).reshape(shape), axis=1)


def by_definition(logp: np.ndarray, nodes: int) -> Tree:
    """One node at a time, the best of all children of all nodes that the tree has."""
    tree = Tree([-1], [0], [0], [np.float32(0)])
    positions, candidates = logp.shape
    while len(tree.parents) < nodes:
        left = [
            (-(tree.masses[parent] + logp[depth, rank]), depth + 1, rank, parent)
            for parent, depth in enumerate(tree.depths)
            if depth < positions
            for rank in range(candidates)
            if (parent, rank) not in set(zip(tree.parents[1:], tree.ranks[1:], strict=True))
        ]
        if not left:
            break
        mass, depth, rank, parent = min(left)
        for of, value in zip(tree, (parent, rank, depth, -mass), strict=True):
            of.append(value)
    return tree


@settings(deadline=None)
@given(marginals(), st.integers(1, 24), st.integers(1, 24))
def test_a_tree_has_the_likeliest_nodes_in_order(logp: np.ndarray, nodes: int, more: int) -> None:
    tree = grow(logp, nodes)
    assert tree == by_definition(logp, nodes)
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
    taken = [mass for of, count in zip(masses, counts, strict=True) for mass in of[1:count]]
    left = [mass for of, count in zip(masses, counts, strict=True) for mass in of[count:]]
    assert not taken or not left or min(taken) >= max(left)


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(LOGP), min_size=6, max_size=6), min_size=1, max_size=6), st.data())
def test_the_budget_of_chains_is_shared_as_ragged_steps_share_it(logp: list[list[float]], data: Any) -> None:
    rows = data.draw(st.integers(len(logp), 7 * len(logp)))
    lens, starts = torch.zeros(8, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    share_rows_torch(torch.tensor(logp), rows, lens, starts)
    masses = [grow(np.array(of, np.float32)[:, None], 7).masses for of in logp]
    assert share(masses, rows) == lens[: len(logp)].tolist()
    with pytest.raises(ValueError, match=rf"rows={len(logp) - 1}: expected {len(logp)}\.\.{7 * len(logp)}"):
        share(masses, len(logp) - 1)


def test_a_walk_follows_the_drawn_tokens_and_ends_where_no_child_has_one() -> None:
    parents, tokens = [-1, 0, 0, 1, 2, 2, 5], [9, 4, 5, 6, 6, 7, 8]
    assert walk(parents, tokens, [5, 6, 7, 1, 1, 3, 1]) == [0, 2, 5]
    assert walk(parents, tokens, [4, 7, 7, 1, 1, 8, 1]) == [0, 1]
    assert walk(parents, tokens, [8, 6, 7, 1, 1, 8, 1]) == [0]
    assert ancestors(parents)[6].tolist() == [True, False, True, False, False, True, True]


class Toy:
    """A target whose next token depends on the two before it, and a draft that is confidently wrong."""

    target = torch.tensor(
        [[[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8]],
         [[0.25, 0.25, 0.5], [0.7, 0.2, 0.1], [0.3, 0.4, 0.3]],
         [[0.05, 0.9, 0.05], [0.4, 0.2, 0.4], [0.5, 0.25, 0.25]]]
    )  # fmt: skip

    def __init__(self, number: int) -> None:
        self.position, self.committed = 2, [0, 1]
        sure = torch.tensor([0.05, 0.15, 0.8]) if number % 2 else torch.tensor([0.3, 0.4, 0.3])
        self.draft = likeliest(torch.stack([sure, sure.flip(0), sure.roll(1)]).log(), 3)

    def first(self) -> Tensor:
        return self.target[0, 1].log()[None]

    def propose(self, last: int, candidates: int) -> Marginals:
        self.committed.append(last)
        return Marginals(self.draft.logp[:, :candidates], self.draft.tokens[:, :candidates])

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        self.tokens = list(tokens)
        before = [self.committed[-2], *(tokens[parent] for parent in parents[1:])]
        return self.target[before, tokens].log()

    def accept(self, path: Sequence[int]) -> None:
        self.committed += [self.tokens[node] for node in path[1:]]
        self.position += len(path)


def drawn(logits: Tensor, positions: Sequence[int]) -> list[int]:
    return logits.exp().multinomial(1)[:, 0].tolist()


@pytest.mark.parametrize(
    "shape", [Shape(4), Shape(3, 1, True), Shape(5, 2), Shape(8, 3), Shape(4, 3, True)], ids=str
)
def test_sampled_tokens_are_distributed_as_the_targets(shape: Shape) -> None:
    torch.manual_seed(3)
    length, runs, counts = 4, 1500, Counter[tuple[int, ...]]()
    accepted = 0
    for _ in range(runs):
        for decoded in decode([Toy(0), Toy(1)], shape, length, [drawn, drawn]):
            counts[tuple(decoded.ids[:length])] += 1
            accepted += sum(decoded.accept_lengths) - len(decoded.steps)
    assert accepted > runs  # or nothing but single tokens would have been judged
    statistic = 0.0
    for ids in itertools.product(range(3), repeat=length):
        text = [0, 1, *ids]
        chance = math.prod(Toy.target[text[at], text[at + 1], text[at + 2]].item() for at in range(length))
        statistic += (counts[ids] - 2 * runs * chance) ** 2 / (2 * runs * chance)
    assert statistic < chi_square_bound(3**length - 1)


SHAPES = [Shape(16), Shape(5, 1, True), Shape(16, 8), Shape(40, 16), Shape(7, 8, True)]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, list[list[int]]]:
    target, draft, tokenizer = load_pair()
    return target, draft, [tokenizer.encode(text) for text in held_out_prompts()[5:40:30]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_output_is_plain_decoding_token_for_token(pair: tuple[Any, Any, Any], shape: Shape) -> None:
    target, draft, prompts = pair
    requests = [PairRequest(target, draft, ids) for ids in prompts]
    decoded = decode(requests, shape, 64, [greedy, greedy])
    for one, ids in zip(decoded, prompts, strict=True):
        assert one.ids[:64] == plain_generate(target, ids, 64, ignore_eos=True)
        assert sum(one.accept_lengths) == len(one.ids) - 1
    both = zip(*(of.steps for of in decoded), strict=False)  # as long as both requests run
    rows = [sum(len(step.tokens) for step in steps) for steps in both]
    assert set(rows) == {2 * shape.rows}
    if shape == Shape(16):
        expected = [generate(target, draft, ids, 64, ignore_eos=True).accept_lengths for ids in prompts]
        assert [one.accept_lengths for one in decoded] == expected
    elif shape.candidates > 1:
        paths = [node for one in decoded for step in one.steps for node in step.path]
        assert max(np.diff(paths)) > 1  # rows were moved


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_seeded_output_is_plain_decoding_with_the_same_noise(pair: tuple[Any, Any, Any], shape: Shape) -> None:
    target, draft, prompts = pair
    draws = [seeded(0.8, gumbel(512, 320, seed)) for seed in (1, 2)]
    plain = decode([PairRequest(target, draft, ids) for ids in prompts], Shape(1), 40, draws)
    found = decode([PairRequest(target, draft, ids) for ids in prompts], shape, 40, draws)
    assert [one.ids[:40] for one in found] == [one.ids for one in plain]
    assert found[0].ids[:40] != decode([PairRequest(target, draft, prompts[0])], Shape(1), 40, [greedy])[0].ids
    assert max(found[0].accept_lengths) > 3
