"""SGLang's own backend of FlashAttention 3 over trees, in graphs and without, against dense attention.

On a GPU with its kernels; without one, torch operations stand for the kernels and recordings for graphs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang.attention import trees
from dflash_sglang.attention.torch_cpu import TorchCpuAttention
from dflash_sglang.attention.trees import serve_trees, why_no_trees
from dflash_sglang.kernels.block.grow_tree import Candidates, Tree, grow_tree
from dflash_sglang.patches import flash3
from tests.support import sglang_layers
from tests.support.attention_target import (
    DIM,
    DTYPE,
    HEADS,
    KV_HEADS,
    LAYERS,
    ON_GPU,
    SCALE,
    TOLERANCE,
    Target,
    dense,
    torch_attention,
    verify_batch,
)
from tests.support.recorded_graphs import Recording

PREFIXES = ([0, 1, 37, 300], [16, 0, 15, 160], [299, 40, 31])

pytestmark = [pytest.mark.gpu] if ON_GPU else []


def normal_decode_set_metadata(
    lengths: Tensor,
    starts: Tensor,
    page_table: Tensor,
    req_to_token: Tensor,
    requests: Tensor,
    pages: int,
    seq_lens: Tensor,
    delta: int,
    page_size: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """SGLang's kernel, in torch operations."""
    lengths.copy_(seq_lens + delta)
    starts[1:] = lengths.cumsum(0)
    page_table.copy_(req_to_token[requests][:, ::page_size][:, :pages] // page_size)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of SGLang's backend; without a GPU, with kernels that are torch operations."""
    sglang_layers.start_rank()
    if ON_GPU:
        yield importlib.import_module(flash3.BACKENDS)
        return
    kernels = ModuleType("sgl_kernel")
    kernels.merge_state_v2 = None  # type: ignore[attr-defined]
    flash = ModuleType("sgl_kernel.flash_attn")
    flash.flash_attn_varlen_func = flash.flash_attn_with_kvcache = None  # type: ignore[attr-defined]
    flash.get_scheduler_metadata = lambda **call: torch.zeros(1)  # type: ignore[attr-defined]
    for stub in (kernels, flash):
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, flash3.BACKENDS, raising=False)
    loaded = importlib.import_module(flash3.BACKENDS)
    monkeypatch.setattr(loaded, "flash_attn_with_kvcache", torch_attention)
    monkeypatch.setattr(loaded, "normal_decode_set_metadata", normal_decode_set_metadata)
    yield loaded
    del sys.modules[flash3.BACKENDS]


def backend_of(target: Target, module: Any, nodes: int, tree: Tree) -> Any:
    """As a runtime state of trees gets one."""
    from dflash_sglang.sglang_names.scheduler import get_spec

    with get_spec().override(speculative_num_draft_tokens=nodes):
        backend = module.FlashAttentionBackend(target.runner)
    assert flash3.spare_launches(backend)
    serve_trees(backend, tree)
    return backend


class Step:
    """The inputs of a verify forward, which keep their place, and its layers."""

    def __init__(self, target: Target, requests: int, nodes: int) -> None:
        rows = requests * nodes
        self.target, self.nodes = target, nodes
        self.projected = torch.zeros(LAYERS, rows, (HEADS + 2 * KV_HEADS) * DIM, dtype=DTYPE)
        self.batch = verify_batch(requests, rows, draft_token_num=nodes, ragged_verify_layout=None)

    def fill(self, prefixes: list[int]) -> None:
        """Requests with these prefixes, then padding."""
        batch, table = self.batch, self.target.table
        batch.req_pool_indices.zero_()
        batch.seq_lens.fill_(1)
        batch.out_cache_loc.zero_()
        for i, prefix in enumerate(prefixes):
            batch.req_pool_indices[i], batch.seq_lens[i] = i + 1, prefix
            batch.out_cache_loc.view(-1, self.nodes)[i] = table[i + 1, prefix : prefix + self.nodes]
        self.projected.copy_(torch.randn(self.projected.shape))

    def parts(self, layer: int) -> tuple[Tensor, ...]:
        return self.projected[layer].split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)

    def forward(self, backend: Any) -> list[Tensor]:
        outputs = []
        for i, layer in enumerate(self.target.layers):
            q, k, v = self.parts(i)
            k, v = (rows.reshape(-1, KV_HEADS, DIM) for rows in (k, v))
            outputs.append(backend.forward_extend(q, k, v, layer, self.batch))
        return outputs

    def expected(self, tree: Tree, prefixes: list[int]) -> list[Tensor]:
        """[requests, nodes, heads, dim] float32 of each layer: dense attention with an ancestor mask."""
        found, nodes = [], torch.arange(self.nodes)
        for i in range(LAYERS):
            q, outs = self.parts(i)[0].view(-1, self.nodes, HEADS, DIM), []
            for request, prefix in enumerate(prefixes):
                slots = self.target.table[request + 1, : prefix + self.nodes].long()
                keys, values = (buffer[slots] for buffer in self.target.pool.get_kv_buffer(i))
                above = (tree.ancestors[request][:, None] >> nodes) & 1 == 1
                seen = torch.cat([torch.ones(self.nodes, prefix, dtype=torch.bool), above], dim=1)
                outs.append(dense(q[request], keys, values, seen, SCALE))
            found.append(torch.stack(outs))
        return found

    def check(self, outputs: list[Tensor], tree: Tree, prefixes: list[int]) -> None:
        for output, right in zip(outputs, self.expected(tree, prefixes), strict=True):
            got = output.view(-1, self.nodes, HEADS, DIM)[: len(prefixes)].float()
            torch.testing.assert_close(got, right, rtol=TOLERANCE, atol=TOLERANCE)


def chains(requests: int, nodes: int) -> Tree:
    node = torch.arange(nodes, dtype=torch.int32).repeat(requests, 1)
    bits = torch.ones_like(node, dtype=torch.int64) << torch.arange(nodes)
    return Tree(node - 1, node, bits.cumsum(dim=1), torch.zeros(requests, nodes))


def grow(tree: Tree) -> None:
    """Random trees of 8 steps with 4 candidates each, into the buffers."""
    requests, nodes = tree.parents.shape
    chances = torch.randn(requests, 8, 4).log_softmax(-1).sort(descending=True).values
    ids = torch.zeros(chances.shape, dtype=torch.int64)
    anchors, tokens = torch.zeros(requests, dtype=torch.int64), torch.zeros(requests, nodes, dtype=torch.int64)
    grow_tree(anchors, Candidates(ids, chances), tokens, tree)


def captured(forward: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """A graph's replay, and its outputs."""
    forward()
    if not ON_GPU:
        with Recording() as recording:
            outputs = forward()
        return recording.replay, outputs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward()
    return graph.replay, outputs


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("nodes", [16, 64])
@torch.inference_mode()
def test_replays_follow_the_prefixes_and_the_trees(module, nodes, page_size):
    """Of a graph with room for one request more, captured with chains over one token."""
    requests, kept = 5, 6
    with torch.device(sglang_layers.DEVICE):
        target, tree = Target(page_size, requests), chains(kept, nodes)
        backend, step = backend_of(target, module, nodes, tree), Step(target, requests, nodes)
        backend.init_cuda_graph_state(requests, requests * nodes)
        backend.init_forward_metadata_out_graph(step.batch, in_capture=True)

        def forward() -> list[Tensor]:
            backend.init_forward_metadata_in_graph(step.batch)
            return step.forward(backend)

        replay, outputs = captured(forward)
        for prefixes in PREFIXES:
            step.fill(prefixes)
            grow(tree)
            backend.init_forward_metadata_out_graph(step.batch)
            replay()
            step.check(outputs, tree, prefixes)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("nodes", [16, 64])
@torch.inference_mode()
def test_forwards_without_a_graph_attend_as_trees(module, nodes, page_size):
    with torch.device(sglang_layers.DEVICE):
        target, tree = Target(page_size, 4), chains(4, nodes)
        backend = backend_of(target, module, nodes, tree)
        for prefixes in PREFIXES:
            step = Step(target, len(prefixes), nodes)
            step.fill(prefixes)
            grow(tree)
            backend.init_forward_metadata(step.batch)
            step.check(step.forward(backend), tree, prefixes)


def sinks(target: Target) -> None:
    target.layers[1].sinks = torch.nn.Parameter(torch.zeros(HEADS))
    target.runner.model = torch.nn.ModuleList(target.layers)


def of_layer(**facts: Any) -> Callable[[Target], None]:
    return lambda target: vars(target.layers[1]).update(facts)


OBSTACLES: dict[str, tuple[Callable[[Target], object], str]] = {
    "another backend": (
        lambda target: setattr(target.runner, "attn_backend", SimpleNamespace()),
        "SimpleNamespace verifies chains; trees need --attention-backend fa3 without DP attention",
    ),
    "FlashAttention 4": (
        lambda target: setattr(target.runner.attn_backend, "_get_scheduler_metadata", None),
        "FlashAttentionBackend verifies chains; trees need --attention-backend fa3 without DP attention",
    ),
    "MLA": (
        lambda target: setattr(target.runner.attn_backend, "use_mla", True),
        "the target's attention is over latent rows, and trees need keys and values of heads",
    ),
    "sliding layers": (of_layer(sliding_window_size=127), "attention layer 1 sees a part of the context"),
    "local layers": (of_layer(use_irope=True), "attention layer 1 sees a part of the context"),
    "cross attention": (of_layer(is_cross_attention=True), "attention layer 1 is cross attention"),
    "capped logits": (of_layer(logit_cap=50.0), "attention layer 1 caps its logits at 50"),
    "head dims": (
        of_layer(head_dim=192, v_head_dim=128),
        "attention layer 1 has keys of 192, values of 128; trees need 64, 128, 256 of both",
    ),
    "sinks": (sinks, "attention has sinks (1.sinks)"),
    "fp8 KV": (
        lambda target: setattr(target.pool, "store_dtype", torch.uint8),
        f"the KV pool holds torch.uint8, and trees need the model's {DTYPE}",
    ),
    "a pool by heads": (
        lambda target: setattr(target.pool, "use_hnd", True),
        "trees do not read MHATokenToKVPool in this layout",
    ),
    "another pool": (
        lambda target: setattr(target.runner, "token_to_kv_pool", SimpleNamespace()),
        "trees do not read SimpleNamespace in this layout",
    ),
    "renamed slots": (
        lambda target: setattr(
            target.runner.kv_index_translator, "space", lambda kind: SimpleNamespace(write=lambda ids: ids)
        ),
        "MHATokenToKVPool has names of its own for slots, and accepted rows are moved by slot",
    ),
    "pools of sliding layers": (
        lambda target: setattr(
            target.runner.kv_index_translator, "space", lambda kind: SimpleNamespace(write=None)
        ),
        "MHATokenToKVPool has names of its own for slots, and accepted rows are moved by slot",
    ),
}


@pytest.fixture
def target(module, monkeypatch) -> Target:
    monkeypatch.setattr(trees, "mambaish_config", lambda config: None)
    target = Target(1, 1)
    target.runner.attn_backend = backend_of(target, module, 16, chains(1, 16))
    return target


@pytest.mark.parametrize("name", OBSTACLES)
def test_a_target_that_verifies_chains_says_why(target, name):
    assert why_no_trees(target.runner) is None
    change, reason = OBSTACLES[name]
    change(target)
    assert why_no_trees(target.runner) == reason


def test_recurrent_layers_verify_chains_and_the_cpu_platform_trees(target, monkeypatch):
    target.runner.attn_backend = TorchCpuAttention(target.runner)
    of_layer(sliding_window_size=127)(target)
    assert why_no_trees(target.runner) is None
    monkeypatch.setattr(trees, "mambaish_config", lambda config: config)
    assert why_no_trees(target.runner) == "the target's recurrent layers verify chains"


@torch.inference_mode()
def test_sinks_that_only_a_forward_shows_end_it(module):
    with torch.device(sglang_layers.DEVICE):
        target = Target(1, 1)
        backend, step = backend_of(target, module, 16, chains(1, 16)), Step(target, 1, 16)
        step.fill([5])
        backend.init_forward_metadata(step.batch)
        q, k, v = step.parts(0)
        k, v = (rows.reshape(-1, KV_HEADS, DIM) for rows in (k, v))
        with pytest.raises(NotImplementedError, match="sinks"):
            backend.forward_extend(q, k, v, target.layers[0], step.batch, sinks=torch.zeros(HEADS))
