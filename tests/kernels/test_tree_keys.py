"""A tree's own keys, added to attention over the prefix: each node attends to its prefix and its ancestors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_sglang.kernels.attention import tree_keys as kernels
from dflash_sglang.kernels.attention.tree_keys import Prefix, TreeKeys

SLOTS = 320  # of the pool
SCALE = 0.4  # sharp: single keys decide


def path(parents: list[int], node: int) -> list[int]:
    """The node and all above it; the root's parent is -1."""
    return [] if node < 0 else [*path(parents, parents[node]), node]


def attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """queries [rows, heads, dim], keys and values [slots, kv_heads, dim], visible [rows, slots]: in float64 the
    output [rows, heads, dim], which is nothing where nothing is visible, and the LSE [heads, rows]."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (of.double().repeat_interleave(group, dim=1) for of in (keys, values))
    scores = torch.einsum("ihd,jhd->hij", queries.double(), keys) * SCALE
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1), values), scores.logsumexp(dim=-1)


class Batch:
    """Random trees over prefixes of a pool; request b has parents[b] and lengths[b] tokens before them."""

    def __init__(
        self,
        parents: list[list[int]],
        lengths: list[int],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        """shape: KV heads, query heads of each, dim. A length of -1 is a padded request: all slots are 0."""
        kv_heads, group, dim = shape
        generator = torch.Generator().manual_seed(seed)
        nodes, heads = len(parents[0]), kv_heads * group
        rows = len(parents) * nodes
        # Queries lie in rows with keys and values, and the first row is not theirs.
        projected = torch.randn(rows + 1, (heads + 2 * kv_heads) * dim, generator=generator)
        self.projected = projected.to(dtype)
        self.queries = self.projected[1:, : heads * dim].view(rows, heads, dim)
        keys, values = torch.randn(2, SLOTS, kv_heads, dim, generator=generator).to(dtype)
        free = iter(torch.randperm(SLOTS, generator=generator).tolist())
        self.before = torch.zeros(rows, SLOTS, dtype=torch.bool)
        self.visible, above, slots = self.before.clone(), [], []
        for request, (of_request, length) in enumerate(zip(parents, lengths, strict=True)):
            of_rows = slice(request * nodes, (request + 1) * nodes)
            self.before[of_rows, [next(free) for _ in range(length)]] = True
            slots.append([0 if length < 0 else next(free) for _ in range(nodes)])
            paths = [path(of_request, node) for node in range(nodes)]
            for row, of_node in zip(self.visible[of_rows], paths, strict=True):
                row[[slots[-1][node] for node in of_node]] = True
            bits = (sum(1 << node for node in of_node) for of_node in paths)
            above.append([mask - (mask >> 63 << 64) for mask in bits])
        self.tree = TreeKeys(keys, values, torch.tensor(slots), torch.tensor(above))

    def expected(self) -> Tensor:
        return attention(self.queries, *self.tree[:2], self.before | self.visible)[0]

    def got(self, twin: str, device: str) -> Tensor:
        """Behind what FlashAttention would give of the prefix; nothing in `out` where one is empty."""
        out, lse = attention(self.queries, *self.tree[:2], self.before)
        prefix = Prefix(out.to(device, self.queries.dtype), lse.float().to(device))
        queries = self.projected.to(device)[1:, : out[0].numel()].view(out.shape)
        tree = TreeKeys(*(one.to(device) for one in self.tree))
        getattr(kernels, f"add_tree_keys_{twin}")(queries, prefix, tree, SCALE)
        assert torch.equal(prefix.lse.cpu(), lse.float())
        return prefix.out.cpu().double()


def chain(nodes: int) -> list[int]:
    return list(range(-1, nodes - 1))


@pytest.mark.parametrize("kv_heads, group", [(2, 1), (2, 3), (2, 4), (1, 8)])
@settings(max_examples=20)
@given(data=st.data())
def test_every_node_attends_to_its_prefix_and_its_ancestors(twin, device, kv_heads, group, data):
    nodes = data.draw(st.integers(1, 40), "nodes")
    bs = data.draw(st.integers(1, 3), "requests")
    lengths = data.draw(st.lists(st.sampled_from([-1, 0, 1, 7, 30]), min_size=bs, max_size=bs), "lengths")
    parents = [
        [-1, *(data.draw(st.integers(max(0, node - 6), node - 1)) for node in range(1, nodes))] for _ in range(bs)
    ]
    batch = Batch(parents, lengths, (kv_heads, group, 64), torch.float32, data.draw(st.integers(0, 99)))
    torch.testing.assert_close(batch.got(twin, device), batch.expected(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("kv_heads, group, dim", [(2, 4, 128), (1, 1, 256), (1, 16, 64)])
def test_halves_are_as_exact_as_their_numbers(twin, device, dtype, tolerance, kv_heads, group, dim):
    """With 64 nodes, so that the last one's bit is the sign of its ancestors."""
    if twin == "triton" and dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16, not its numbers")
    parents = [chain(64), [-1, *(node // 3 for node in range(63))]]
    batch = Batch(parents, [5, 40], (kv_heads, group, dim), dtype, seed=1)
    torch.testing.assert_close(batch.got(twin, device), batch.expected(), rtol=tolerance, atol=tolerance)
