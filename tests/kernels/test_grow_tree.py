"""Trees of proposals: the Triton kernel and its torch twin equal a search with a heap over all children."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels.block import grow_tree as kernels

INF = float("inf")
GRID = 64  # sums of multiples of 1 / GRID are exact


class Grown(NamedTuple):
    """[bs][N] each."""

    tokens: list[list[int]]
    parents: list[list[int]]
    depths: list[list[int]]
    ancestors: list[list[int]]
    mass: list[list[float]]


def grown(twin, device, anchors, ids, logprobs, nodes) -> Grown:
    bs = len(anchors)
    tokens = torch.full((bs, nodes), -7, device=device)
    tree = kernels.Tree(
        *(torch.full((bs, nodes), -7, dtype=torch.int32, device=device) for _ in range(2)),
        torch.full((bs, nodes), -7, device=device),
        torch.full((bs, nodes), 7.0, device=device),
    )
    # Last tokens are a column of wider rows.
    columns = torch.tensor([[anchor, -7] for anchor in anchors], device=device)[:, 0]
    candidates = kernels.Candidates(torch.tensor(ids, device=device), torch.tensor(logprobs, device=device))
    getattr(kernels, f"grow_tree_{twin}")(columns, candidates, tokens, tree)
    return Grown(*(values.tolist() for values in (tokens, *tree)))


def expected(anchor, ids, logprobs, nodes):
    """Every child of every popped node is on the heap -> (token, parent, depth, above, mass) of each node."""
    popped, heap = [(anchor, -1, 0, {0}, 0.0)], []
    while len(popped) < nodes:
        *_, depth, above, mass = popped[-1]
        for rank in range(len(ids[depth]) if depth < len(ids) else 0):
            child = mass + logprobs[depth][rank]
            if child > -INF:
                heapq.heappush(heap, (-child, depth + 1, rank, len(popped) - 1, ids[depth][rank], above))
        if not heap:
            break
        minus_mass, depth, _, parent, token, above = heapq.heappop(heap)
        popped.append((token, parent, depth, above | {len(popped)}, -minus_mass))
    padding = range(len(popped), nodes)
    return popped + [(anchor, -1, 0, {node}, -INF) for node in padding]


@st.composite
def marginals(draw):
    """(ids, logprobs) [bs][steps][K] of a random batch, ranks descending, with ties and -inf."""
    bs, steps, count = draw(st.integers(1, 3)), draw(st.integers(1, 15)), draw(st.integers(1, 9))
    levels = draw(st.sampled_from([1, 3, 200]))
    value = st.one_of(st.integers(-levels, 0).map(lambda level: level / GRID), st.just(-INF))
    row = st.lists(value, min_size=count, max_size=count).map(lambda values: sorted(values, reverse=True))
    logprobs = draw(st.lists(st.lists(row, min_size=steps, max_size=steps), min_size=bs, max_size=bs))
    ids = [[[100 * s + k + 10_000 * b for k in range(count)] for s in range(steps)] for b in range(bs)]
    return ids, logprobs


@settings(max_examples=25)
@given(tables=marginals(), nodes=st.integers(1, 64))
def test_nodes_are_popped_best_first(twin, device, tables, nodes):
    ids, logprobs = tables
    anchors = [7 + request for request in range(len(ids))]
    found = grown(twin, device, anchors, ids, logprobs, nodes)
    for request, anchor in enumerate(anchors):
        tokens, parents, depths, above, mass = zip(
            *expected(anchor, ids[request], logprobs[request], nodes), strict=True
        )
        assert found.tokens[request] == list(tokens)
        assert found.parents[request] == list(parents)
        assert found.depths[request] == list(depths)
        assert [value % 2**64 for value in found.ancestors[request]] == [sum(1 << j for j in of) for of in above]
        assert found.mass[request] == list(mass)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10_000), bs=st.integers(1, 4), nodes=st.sampled_from([1, 8, 16, 33, 64]),
    peak=st.sampled_from([0.0, 3.0, 12.0]), count=st.sampled_from([1, 8, 16]),
)  # fmt: skip
def test_a_tree_of_real_numbers_is_the_start_of_every_larger_one(
    triton_runs, device, seed, bs, nodes, peak, count
):
    """Sums that round: the twins agree in every bit."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, 15, 300, generator=generator)
    logits[..., 0] += peak
    logprobs, ids = (values.tolist() for values in logits.log_softmax(dim=-1).topk(count))
    anchors = list(range(bs))
    trees = [grown(twin, device, anchors, ids, logprobs, nodes) for twin in ("torch", "triton")]
    assert trees[0] == trees[1]
    whole = grown("torch", device, anchors, ids, logprobs, 64)
    assert trees[0] == Grown(*([row[:nodes] for row in rows] for rows in whole))
    assert count > 1 or whole.depths == [[*range(16), *[0] * 48]] * bs, "a chain, and padding"


@pytest.mark.parametrize("nodes, steps, count", [(65, 15, 8), (16, 1 << 11, 8), (16, 15, 1 << 14)])
def test_a_tree_that_does_not_fit_into_its_keys_is_refused(nodes, steps, count):
    table = torch.zeros(1, 1, 1).expand(1, steps, count)
    with pytest.raises(ValueError, match=f"{nodes} nodes over {steps} steps of {count} candidates"):
        kernels.grow_tree(
            torch.zeros(1), kernels.Candidates(table, table), torch.zeros(1, nodes), kernels.Tree(*[table] * 4)
        )
