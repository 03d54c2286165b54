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


def attention(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Of one query [dim] to keys and values [any, dim], in float64: the output [dim] and the LSE."""
    scores = keys.double() @ query.double() * SCALE
    return torch.softmax(scores, dim=0) @ values.double(), scores.logsumexp(dim=0)


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
        self.parents = parents
        # Queries lie in rows with keys and values, and the first row is not theirs.
        projected = self.projected = torch.randn(rows + 1, (heads + 2 * kv_heads) * dim, generator=generator).to(
            dtype
        )
        self.queries = projected[1:, : heads * dim].view(rows, heads, dim)
        self.keys, self.values = torch.randn(2, SLOTS, kv_heads, dim, generator=generator).to(dtype)
        free = iter(torch.randperm(SLOTS, generator=generator).tolist())
        self.before = [[next(free) for _ in range(length)] for length in lengths]
        self.slots = [[0 if length < 0 else next(free) for _ in range(nodes)] for length in lengths]

    def prefix(self) -> Prefix:
        """What FlashAttention would give; nothing in `out` where a prefix is empty."""
        rows, heads, _ = self.queries.shape
        out = torch.full(self.queries.shape, torch.nan, dtype=self.queries.dtype)
        lse = torch.full((heads, rows), -torch.inf)
        for row, head, request, kv_head in self.each():
            if before := self.before[request]:
                found = attention(
                    self.queries[row, head], self.keys[before, kv_head], self.values[before, kv_head]
                )
                out[row, head], lse[head, row] = found[0].to(out.dtype), found[1].float()
        return Prefix(out, lse)

    def each(self) -> list[tuple[int, int, int, int]]:
        """Row, head, request and KV head of each query."""
        (rows, heads), kv_heads = self.queries.shape[:2], self.keys.shape[1]
        nodes = len(self.parents[0])
        return [(r, h, r // nodes, h * kv_heads // heads) for r in range(rows) for h in range(heads)]

    def expected(self) -> Tensor:
        out, nodes = torch.empty(self.queries.shape, dtype=torch.float64), len(self.parents[0])
        for row, head, request, kv_head in self.each():
            above = path(self.parents[request], row % nodes)
            seen = self.before[request] + [self.slots[request][node] for node in above]
            out[row, head], _ = attention(
                self.queries[row, head], self.keys[seen, kv_head], self.values[seen, kv_head]
            )
        return out

    def tree(self) -> TreeKeys:
        masks = [[sum(1 << j for j in path(of, i)) for i in range(len(of))] for of in self.parents]
        signed = [[mask - (1 << 64) if mask >> 63 else mask for mask in of] for of in masks]
        return TreeKeys(self.keys, self.values, torch.tensor(self.slots), torch.tensor(signed))

    def got(self, twin: str, device: str) -> Tensor:
        prefix, tree = (type(x)(*(one.to(device) for one in x)) for x in (self.prefix(), self.tree()))
        lse, queries = prefix.lse.clone(), self.projected.to(device)[1:, : prefix.out[0].numel()]
        getattr(kernels, f"add_tree_keys_{twin}")(queries.view(prefix.out.shape), prefix, tree, SCALE)
        assert torch.equal(prefix.lse, lse)
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
