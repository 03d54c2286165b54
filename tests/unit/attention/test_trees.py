"""Attention of trees: each node's output is that of its path run alone as a chain."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from dflash_sglang.attention.torch_cpu import TorchCpuAttention
from dflash_sglang.attention.trees import serve_trees
from dflash_sglang.kernels.block.grow_tree import Candidates, Tree, grow_tree_torch

HEADS, KV_HEADS, DIM = 4, 2, 8


def no_trees(requests: int, nodes: int) -> Tree:
    """Buffers with nothing in them that is a tree's."""
    of = (requests, nodes)
    return Tree(*(torch.full(of, -99, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.int64)),
                torch.zeros(of))  # fmt: skip


def grown(requests: int, nodes: int, generator: torch.Generator, most: int | None = None) -> Tree:
    """Trees of 6 steps and 3 candidates each, the first one short of candidates; in buffers of `most` requests."""
    chances = torch.randn(requests, 6, 3, generator=generator).log_softmax(-1).sort(descending=True).values
    chances[0, 1:] = -torch.inf
    tree = no_trees(most or requests, nodes)
    rows = Tree(*(buffer[:requests] for buffer in tree))
    tokens = torch.zeros(requests, nodes, dtype=torch.int64)
    ids = torch.zeros(chances.shape, dtype=torch.int64)
    grow_tree_torch(torch.zeros(requests, dtype=torch.int64), Candidates(ids, chances), tokens, rows)
    return tree


def path(tree: Tree, request: int, node: int) -> list[int]:
    parent = int(tree.parents[request, node])
    return [*(path(tree, request, parent) if parent >= 0 else []), node]


class Pool:
    """A KV pool of one layer."""

    dtype = torch.float32

    def __init__(self, slots: int, generator: torch.Generator) -> None:
        self.key, self.value = torch.randn(2, slots, KV_HEADS, DIM, generator=generator)

    def set_kv_buffer(self, layer: Any, loc: Any, k: Tensor, v: Tensor, *scales: None) -> None:
        self.key[loc.loc], self.value[loc.loc] = k, v

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.key

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.value


class Batch:
    """A verify forward of `nodes` rows for each request, in slots scattered over a pool."""

    def __init__(self, prefixes: list[int], nodes: int, seed: int) -> None:
        self.prefixes, self.nodes = prefixes, nodes
        self.generator = torch.Generator().manual_seed(seed)
        longest = max(prefixes) + nodes
        self.pool = Pool(1 + len(prefixes) * longest, self.generator)
        slots = 1 + torch.randperm(len(prefixes) * longest, generator=self.generator)
        self.slots = slots.view(len(prefixes), longest)
        self.q, self.k, self.v = (
            torch.randn(len(prefixes) * nodes, heads, DIM, generator=self.generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

    def attend(self, tree: Tree | None, window: int | None) -> Tensor:
        """[requests, nodes, heads * dim]"""
        own = [row[n : n + self.nodes] for row, n in zip(self.slots, self.prefixes, strict=True)]
        rows = self.q, self.k, self.v
        out = self._run(self.slots, self.prefixes, self.nodes, torch.cat(own), rows, tree, window)
        return out.view(len(self.prefixes), self.nodes, -1)

    def alone(self, request: int, nodes: list[int], window: int | None) -> Tensor:
        """The last of these rows of a request, run as a chain: [heads * dim]"""
        prefix, rows = self.prefixes[request], [request * self.nodes + node for node in nodes]
        before, own = self.slots[request, :prefix], self.slots[request, prefix:][nodes]
        table = torch.cat([before, own])[None]
        kept = self.q[rows], self.k[rows], self.v[rows]
        return self._run(table, [prefix], len(nodes), own, kept, None, window)[-1]

    def _run(
        self, table: Tensor, prefixes: list[int], width: int, own: Tensor, rows: tuple[Tensor, Tensor, Tensor],
        tree: Tree | None, window: int | None,
    ) -> Tensor:  # fmt: skip
        runner: Any = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=table.int()), token_to_kv_pool=self.pool
        )
        backend = TorchCpuAttention(runner)
        if tree is not None:
            late = no_trees(*tree.parents.shape)
            serve_trees(backend, late)
        batch: Any = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=torch.arange(len(prefixes)),
            seq_lens=torch.tensor(prefixes),
            out_cache_loc=own,
            spec_info=SimpleNamespace(draft_token_num=width, ragged_verify_layout=None),
        )
        layer: Any = SimpleNamespace(
            layer_id=0, is_cross_attention=False, logit_cap=0.0, tp_q_head_num=HEADS, qk_head_dim=DIM,
            v_head_dim=DIM, scaling=0.5, attn_type=AttentionType.DECODER, k_scale=None, v_scale=None,
            sliding_window_size=-1 if window is None else window - 1,
        )  # fmt: skip
        backend.init_forward_metadata(batch)
        if tree is not None:
            for buffer, values in zip(late, tree, strict=True):  # grown once the forward is planned
                buffer.copy_(values)
        return backend.forward_extend(rows[0].flatten(1), rows[1], rows[2], layer, batch)


@settings(max_examples=40, deadline=None)
@given(
    prefixes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    nodes=st.sampled_from([1, 2, 9, 16, 64]),
    window=st.one_of(st.none(), st.integers(1, 12)),
    seed=st.integers(0, 999),
)
def test_a_node_attends_as_the_last_of_its_path(prefixes, nodes, window, seed):
    """Windows of sliding layers count depths. Trees stand in the first rows of larger buffers."""
    batch = Batch(prefixes, nodes, seed)
    tree = grown(len(prefixes), nodes, batch.generator, most=len(prefixes) + 2)
    got = batch.attend(tree, window)
    shuffle = random.Random(seed)
    for request in range(len(prefixes)):
        for node in {0, nodes - 1, *shuffle.sample(range(nodes), min(nodes, 8))}:
            expected = batch.alone(request, path(tree, request, node), window)
            torch.testing.assert_close(got[request, node], expected, rtol=1e-5, atol=1e-6)
