"""What `bench.tree_accept` counts, on a small text and on the pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench import tree_accept
from bench.tree_accept import Start, Text, Way
from dflash_sglang.pair import held_out_prompts
from training.evaluate import load_pair
from training.shapes import Marginals, Tree

# Positions 1 and 2. The best tree has the paths: none, 7, 7 5, 8, 8 5, 7 6, 8 6.
LOGP = np.log(np.array([[0.5, 0.4], [0.9, 0.1]], np.float32))
TOKENS = np.array([[7, 8], [5, 6]])


def text(ids: list[int]) -> Text:
    """Each start but the last has the same marginals."""
    starts = len(ids) - 2
    return Text(np.array(ids), Marginals(np.stack([LOGP] * starts), np.stack([TOKENS] * starts)))


def started(*ids: list[int], candidates: int = 2) -> list[list[Start]]:
    return [tree_accept.starts_of(text(of), candidates) for of in ids]


def test_a_start_has_its_tree_and_the_nodes_on_the_targets_path() -> None:
    (starts,) = started([1, 8, 5, 7, 6, 0, 0])
    assert starts[0].tree.ranks[:5] == [0, 0, 0, 1, 0] and starts[0].tree.parents[:5] == [-1, 0, 1, 0, 3]
    assert [of.path.tolist() for of in starts] == [[0, 3, 4], [0], [0, 1, 5], [0]]
    assert [of.path.tolist() for of in started([1, 8, 5, 7, 6, 0, 0], candidates=1)[0]] == [[0], [0], [0, 1], [0]]


def test_a_step_commits_the_path_within_its_rows_and_starts_the_next_one_there() -> None:
    batch = started([1, 8, 5, 7, 6, 0, 0])
    assert tree_accept.accept_lengths(batch, 3, False) == [[1, 1, 2]]
    assert tree_accept.accept_lengths(batch, 4, False) == [[2, 2]]
    assert tree_accept.accept_lengths(batch, 6, False) == [[3, 1]]
    assert tree_accept.mean([batch, batch], 4, False) == 2.0


def test_shared_rows_go_to_the_likeliest_nodes_of_those_that_still_run() -> None:
    def start(masses: list[float], path: list[int]) -> Start:
        return Start(Tree([], [], [], masses), np.array(path))

    sure, unsure = [0.0, -0.1, -0.2, -0.3], [0.0, -1.0, -2.0, -3.0]
    batch = [[start(sure, [0, 1, 2, 3])] * 7, [start(unsure, [0, 1])] * 2]
    assert tree_accept.accept_lengths(batch, 2, True) == [[3, 3, 2], [1, 1]]
    assert tree_accept.accept_lengths(batch, 2, False) == [[2, 2, 2, 2], [2]]


def test_continuations_are_counted_by_what_came_before() -> None:
    batch, texts = (
        started([1, 8, 5, 7, 6, 0, 0], [1, 7, 5, 0, 0]),
        [text([1, 8, 5, 7, 6, 0, 0]), text([1, 7, 5, 0, 0])],
    )
    found = tree_accept.continuations({2: [batch]}, [texts], 2, 4)
    # First text: 8, of rank 1, then 5, the draft's likeliest, which is not in the tree. Then 7, and 6, which is
    # neither. Second text: 7, and 5, which is both.
    assert found["sibling"] == {"nodes": 1, "next_in_tree": 0.0, "next_is_draft_likeliest": 1.0}
    assert found["likeliest"] == {"nodes": 2, "next_in_tree": 0.5, "next_is_draft_likeliest": 0.5}


def test_a_gain_is_of_pooled_tokens_over_pooled_steps() -> None:
    trees, chains = started([1, 8, 5, 7, 6, 0, 0]), started([1, 8, 5, 7, 6, 0, 0], candidates=1)
    found = tree_accept.gain({2: [trees, trees], 1: [chains, chains]}, 2, 4)
    assert found == {"ratio": pytest.approx((4 / 2) / (4 / 3), abs=1e-4), "standard_error": 0.0}


@pytest.mark.slow
def test_shapes_counted_on_texts_are_decoded_step_by_step_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_accept, "NEW_TOKENS", 32)
    ways = (Way("greedy", 0), Way("1.0", 1.0))
    monkeypatch.setattr(tree_accept, "WAYS", ways)
    monkeypatch.setattr(tree_accept, "SEEDS", 1)
    target, draft, tokenizer = load_pair()
    prompts = [tokenizer.encode(of) for of in held_out_prompts()[:2]]
    texts: Any = tree_accept.read(target, draft, prompts)
    for way in ways:
        starts = {k: [[tree_accept.starts_of(of, k) for of in texts[way.name][0]]] for k in (1, 8, 16)}
        assert all(tree_accept.equal_step_by_step(target, draft, prompts, way, starts))
