"""Accept (C2, C3, C4): what a walk through a block or a tree commits, and which KV rows move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels.block import accept as kernels
from dflash_sglang.kernels.block.grow_tree import Tree
from tests.kernels.test_block import ROWS, Accepts, ragged_rows, starts_of


def paths_of(device, parents, block):
    """parents [bs][N], -1 of the root and of padding -> Paths full of sentinels; slot = 1000 * request + node."""
    depths, ancestors = [], []
    for of_tree in parents:
        depth, above = [], []
        for node, parent in enumerate(of_tree):
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
            above.append(1 << node | (above[parent] if parent >= 0 else 0))
        depths.append(depth)
        ancestors.append([bits - (bits >> 63 << 64) for bits in above])
    bs, nodes = len(parents), len(parents[0])
    tree = Tree(
        *(torch.tensor(values, dtype=torch.int32, device=device) for values in (parents, depths)),
        torch.tensor(ancestors, device=device),
        torch.zeros(bs, nodes, device=device),
    )
    slots = torch.arange(bs, device=device)[:, None] * 1000 + torch.arange(nodes, device=device)
    moves = (torch.full((bs * block,), -7, device=device) for _ in range(2))
    return kernels.Paths(tree, slots, torch.full((bs, block), -7, device=device), *moves)


@st.composite
def trees(draw, bs, block):
    """(tokens, target_ids, parents) [bs][N]: siblings differ, no node is deeper than block - 1, some are padding.
    What the target answers is often one of the children."""
    nodes = draw(st.integers(1, 64))
    batch = []
    for _ in range(bs):
        tokens, parents, depths = [draw(st.integers(0, 2))], [-1], [0]
        real = draw(st.integers(1, nodes))
        width = draw(st.sampled_from([2, 5, 64]))  # parents are among the last of so many nodes
        for node in range(1, nodes):
            parent = draw(st.integers(max(0, node - width), node - 1))
            if node >= real or depths[parent] == block - 1:
                parent = -1
            siblings = {tokens[other] for other in range(1, node) if parents[other] == parent}
            others = sorted(set(range(len(siblings) + 3)) - siblings)
            tokens.append(draw(st.sampled_from(others)) if parent >= 0 else tokens[0])
            parents.append(parent)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        target = []
        for node in range(nodes):
            children = [tokens[other] for other in range(1, nodes) if parents[other] == node]
            target.append(draw(st.sampled_from(children * 4 + [99])))
        batch.append((tokens, target, parents))
    return tuple(zip(*batch, strict=True))


def walked(tokens, target, parents):
    """The nodes that a walk from the root visits."""
    path = [0]
    while True:
        children = [n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == target[path[-1]]]
        if not children:
            return path
        path += children


@st.composite
def blocks(draw, bs, block):
    """The same of blocks, whose nodes are a chain."""
    values = st.lists(st.sampled_from([0, 1, 1, 1]), min_size=block, max_size=block)
    return tuple([draw(values) for _ in range(bs)] for _ in range(2)) + ([list(range(-1, block - 1))] * bs,)


@pytest.mark.parametrize("of_trees", [True, False], ids=["trees", "blocks"])
@settings(max_examples=50)
@given(data=st.data())
def test_a_walk_from_the_root_is_committed_within_its_rows_and_its_limit(twin, device, of_trees, data):
    """All rows or the first ones of each request; its limit is its own wherever it stands in the batch. Rows of a
    tree are moved to the front."""
    bs, block = data.draw(st.integers(1, 6)), data.draw(st.integers(1 + of_trees, 17))
    tokens, target, parents = data.draw((trees if of_trees else blocks)(bs, block))
    nodes, most = len(parents[0]), data.draw(st.lists(st.integers(1, block), min_size=bs, max_size=bs))
    paths = paths_of(device, parents, block) if of_trees else None
    requests = data.draw(st.permutations(range(ROWS)))[:bs]
    prefix = list(range(10, 10 + bs))
    lens, ragged, rows = [nodes] * bs, None, (tokens, target)
    if data.draw(st.booleans()):
        lens = data.draw(st.lists(st.integers(1, nodes), min_size=bs, max_size=bs))
        starts, widths = torch.tensor(starts_of(lens)).int(), torch.tensor(lens).int()
        ragged, padding = kernels.Ragged(starts.to(device), widths.to(device), nodes), data.draw(st.integers(0, 9))
        rows = tuple(ragged_rows(lens, values, padding) for values in rows)
    out = Accepts(twin, device, *rows, prefix, requests, most, ragged, paths)
    for b in range(bs):
        verified = [values[: lens[b]] for values in (tokens[b], target[b], parents[b])]
        path = walked(*verified)[: most[b]]
        committed = [target[b][node] for node in path]
        assert out.committed[b] == committed and out.bonus_tokens[b] == committed[-1]
        assert out.new_seq_lens[b] == prefix[b] + len(path)
        assert out.relay.bonus_tokens[requests[b]] == committed[-1]
        assert out.relay.new_seq_lens[requests[b]] == prefix[b] + len(path)
        if paths is None:
            continue
        assert paths.nodes[b].tolist() == path + [0] * (block - len(path))
        pairs = list(zip(*(of.view(bs, block)[b].tolist() for of in (paths.sources, paths.targets)), strict=True))
        moved, expected = list(range(1000)), list(range(1000))
        for source, at in pairs:
            moved[at - 1000 * b] = source - 1000 * b
        expected[: len(path)] = path
        assert moved == expected
        # No row is copied onto itself while another is copied there.
        assert len({at for _, at in pairs}) == len(set(pairs))
