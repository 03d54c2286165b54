"""FlashAttention 3: one schedule for the layers of a captured forward, queries read where they lie, and trees.

Trees are verified by SGLang's own backend, in graphs and without, against dense attention: on a GPU with its
kernels; without one, torch operations stand for the kernels and recordings for graphs.
"""

from __future__ import annotations

import functools
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
from dflash_sglang.attention.verifying import prepares_in_graph
from dflash_sglang.kernels.block.grow_tree import Candidates, Tree, grow_tree
from dflash_sglang.patches import flash3
from dflash_sglang.patches.flash3 import SharedSchedules, spare_launches
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
WIDTH = 16

pytestmark = [pytest.mark.gpu] if ON_GPU else []


# ---- Over trees --------------------------------------------------------------------------------------------


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
    assert spare_launches(backend)
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


@pytest.mark.parametrize(("nodes", "page_size"), [(16, 1), (64, 16)])
@pytest.mark.parametrize("in_graph", [True, False])
@torch.inference_mode()
def test_every_node_attends_to_its_prefix_and_its_ancestors(module, in_graph, nodes, page_size):
    """A graph has room for one request more, is captured with chains over one token, and finds its page table."""
    requests = 5
    with torch.device(sglang_layers.DEVICE):
        target, tree = Target(page_size, requests), chains(requests + 1, nodes)
        backend, step = backend_of(target, module, nodes, tree), Step(target, requests, nodes)

        def forward() -> list[Tensor]:
            backend.init_forward_metadata_in_graph(step.batch)
            return step.forward(backend)

        if in_graph:
            backend.init_cuda_graph_state(requests, requests * nodes)
            backend.init_forward_metadata_out_graph(step.batch, in_capture=True)
            replay, outputs = captured(forward)
        for prefixes in PREFIXES:
            if not in_graph:
                step = Step(target, len(prefixes), nodes)
            step.fill(prefixes)
            grow(tree)
            if in_graph:
                replay()
            else:
                backend.init_forward_metadata(step.batch)
                outputs = step.forward(backend)
            step.check(outputs, tree, prefixes)


def sinks(target: Target) -> None:
    target.layers[1].sinks = torch.nn.Parameter(torch.zeros(HEADS))
    target.runner.model = torch.nn.ModuleList(target.layers)


def of_layer(**facts: Any) -> Callable[[Target], None]:
    return lambda target: vars(target.layers[1]).update(facts)


def of(path: str, value: Any) -> Callable[[Target], None]:
    """path: of what is set, below the target."""
    *owners, name = path.split(".")
    return lambda target: setattr(functools.reduce(getattr, owners, target), name, value)


def space(write: Any) -> Callable[[Target], None]:
    return of("runner.kv_index_translator.space", lambda kind: SimpleNamespace(write=write))


CHAINS = "verifies chains; trees need --attention-backend fa3 without DP attention"
RENAMED = "MHATokenToKVPool has names of its own for slots, and accepted rows are moved by slot"
LATENT = "the target's attention is over latent rows, and trees need keys and values of heads"
# fmt: off
OBSTACLES: dict[str, tuple[Callable[[Target], object], str]] = {
    "another backend": (of("runner.attn_backend", SimpleNamespace()), f"SimpleNamespace {CHAINS}"),
    "FlashAttention 4": (of("runner.attn_backend._get_scheduler_metadata", None),
                         f"FlashAttentionBackend {CHAINS}"),
    "MLA": (of("runner.attn_backend.use_mla", True), LATENT),
    "sliding layers": (of_layer(sliding_window_size=127), "attention layer 1 sees a part of the context"),
    "local layers": (of_layer(use_irope=True), "attention layer 1 sees a part of the context"),
    "cross attention": (of_layer(is_cross_attention=True), "attention layer 1 is cross attention"),
    "capped logits": (of_layer(logit_cap=50.0), "attention layer 1 caps its logits at 50"),
    "head dims": (of_layer(head_dim=192, v_head_dim=128),
                  "attention layer 1 has keys of 192, values of 128; trees need 64, 128, 256 of both"),
    "sinks": (sinks, "attention has sinks (1.sinks)"),
    "fp8 KV": (of("pool.store_dtype", torch.uint8),
               f"the KV pool holds torch.uint8, and trees need the model's {DTYPE}"),
    "a pool by heads": (of("pool.use_hnd", True), "trees do not read MHATokenToKVPool in this layout"),
    "another pool": (of("runner.token_to_kv_pool", SimpleNamespace()),
                     "trees do not read SimpleNamespace in this layout"),
    "renamed slots": (space(lambda ids: ids), RENAMED),
    "pools of sliding layers": (space(None), RENAMED),
}
# fmt: on


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


# ---- Fewer launches ----------------------------------------------------------------------------------------


def call(lengths: Tensor, context: int, device: str = "cpu", **other: Any) -> dict[str, Any]:
    """What SGLang's backend passes for one layer of blocks at these lengths [bs]."""
    bs, pages = len(lengths), len(lengths) * context + 1
    generator = torch.Generator(device).manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    pages_of = 1 + torch.arange(bs * context, dtype=torch.int32, device=device).view(bs, context)
    first_rows = torch.arange(0, (bs + 1) * WIDTH, WIDTH, dtype=torch.int32, device=device)
    return {
        "q": rows(bs * WIDTH, HEADS, DIM),
        "k_cache": rows(pages, 1, KV_HEADS, DIM),
        "v_cache": rows(pages, 1, KV_HEADS, DIM),
        "page_table": pages_of,
        "cache_seqlens": lengths,
        "cu_seqlens_q": first_rows,
        "max_seqlen_q": WIDTH,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "num_splits": 0,
        **other,
    }


class Flash:
    """Notes the schedule of each call."""

    def __init__(self) -> None:
        self.schedules: list[dict[str, Any]] = []
        self.used: list[Any] = []

    def schedule(self, **arguments: Any) -> Tensor:
        self.schedules.append(arguments)
        return torch.tensor(len(self.schedules))

    def attend(self, **arguments: Any) -> None:
        self.used.append(arguments.get("scheduler_metadata"))


def test_layers_of_a_captured_forward_share_a_schedule_for_each_kind_of_layer_and_other_calls_keep_theirs():
    """Others: of lengths in another tensor (eager, or of another backend), with a window or a schedule."""
    flash, lengths, given = Flash(), torch.tensor([40, 17], dtype=torch.int32), torch.tensor(99)
    shared = SharedSchedules(flash.attend, flash.schedule)
    shared(**call(lengths, 64))
    shared.begin(lengths)
    for layer in ({}, dict(causal=False), {}, dict(window_size=(31, 0)), dict(scheduler_metadata=given)):
        shared(**call(lengths, 64, **layer))
    shared(**call(lengths.clone(), 64))
    shared.begin(lengths)  # the next forward makes its own, within its own graph
    shared(**call(lengths, 64))
    used = [None if one is None else int(one) for one in flash.used]
    assert used == [None, 1, 2, 1, None, 99, None, 3]
    made = {key: value for key, value in flash.schedules[0].items() if not isinstance(value, Tensor)}
    assert made == dict(
        batch_size=2, max_seqlen_q=WIDTH, max_seqlen_k=64, num_heads=HEADS, num_heads_k=KV_HEADS, headdim=DIM,
        headdim_v=DIM, qkv_dtype=torch.bfloat16, page_size=1, causal=True, has_softcap=False, num_splits=0,
    )  # fmt: skip


def test_layers_of_trees_share_a_schedule_over_prefixes():
    """Of calls that SGLang makes for causal blocks."""
    lengths, schedules, causal = torch.tensor([40, 17], dtype=torch.int32), [], []

    def attend(**arguments: Any) -> tuple[Tensor, Tensor]:
        assert arguments["return_softmax_lse"]
        causal.append(arguments["causal"])
        return torch.zeros(2 * WIDTH, HEADS, DIM), torch.full((HEADS, 2 * WIDTH), -torch.inf)

    shared = SharedSchedules(attend, lambda **arguments: schedules.append(arguments["causal"]))
    shared.begin(lengths)
    slots = torch.arange(2 * WIDTH)
    roots = torch.ones(2, WIDTH, dtype=torch.int64) << torch.arange(WIDTH)
    with shared.over_trees(roots, slots):
        layer = call(lengths, 64, softmax_scale=1.0)
        outputs = [shared(**layer) for _ in range(3)]
    assert schedules == [False] and causal == [False] * 3
    own = layer["v_cache"].view(-1, KV_HEADS, DIM)[slots].repeat_interleave(HEADS // KV_HEADS, dim=1)
    for output in outputs:  # a node without ancestors, and without a prefix, has its own value
        assert torch.equal(output, own.float())
    assert shared(**call(lengths, 64, causal=True, return_softmax_lse=True)) is not None
    assert causal[-1], "after the trees"


class FlashAttentionBackend:
    """As much of SGLang's as is taken hold of."""

    use_mla = _disable_scheduler_metadata_precompute = use_sliding_window_kv_pool = False
    speculative_num_draft_tokens = WIDTH
    topk, local_attn_builder, kv_index_translator = 1, None, SimpleNamespace(reads_are_translated=False)

    def __init__(self, schedule: Any) -> None:
        self._get_scheduler_metadata = schedule
        self.forward_metadata = SimpleNamespace(cache_seqlens_int32=torch.tensor([40]))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.prepared = forward_batch

    def _set_decode_page_metadata(self, plan: Any, metadata: Any, requests: Any, lens: Tensor, more: int) -> None:
        self.tables = requests, (lens + more).tolist()

    def forward_extend(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool) -> Any:
        self.written = (k, v, save)
        return q.contiguous().view(-1, HEADS, DIM)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Made-up kernels in a module with that backend."""
    kernels = Flash()
    module = SimpleNamespace(FlashAttentionBackend=FlashAttentionBackend, flash_attn_with_kvcache=kernels.attend)
    monkeypatch.setitem(flash3.sys.modules, flash3.BACKENDS, module)
    return SimpleNamespace(kernels=kernels, module=module, backend=lambda: FlashAttentionBackend(kernels.schedule))


def test_a_backend_of_flash_attention_3_begins_each_forward_that_it_prepares_inside_of_a_graph(flash, monkeypatch):
    """Also as one of a target's two backends."""
    backends = [flash.backend(), flash.backend()]
    assert spare_launches(backends[0]) and spare_launches(SimpleNamespace(full_attn_backend=backends[1]))
    for backend in (*backends, backends[0]):
        batch = verify_batch(2, 4, draft_token_num=2, ragged_verify_layout=None)
        backend.init_forward_metadata_in_graph(batch)
        requests, lens = backend.tables
        assert backend.prepared is batch and requests is batch.req_pool_indices and lens == [1 + WIDTH] * 2
        assert prepares_in_graph(backend)
        for _ in range(2):
            flash.module.flash_attn_with_kvcache(**call(backend.forward_metadata.cache_seqlens_int32, 64))
    assert [int(used) for used in flash.kernels.used] == [1, 1, 2, 2, 3, 3]
    layout = SimpleNamespace(verify_lens=torch.tensor([3, 0]), qo_indptr_device=torch.tensor([0, 3, 3]))
    backend.forward_metadata.cu_seqlens_q = torch.zeros(3)
    backend.init_forward_metadata_in_graph(verify_batch(2, 3, draft_token_num=2, ragged_verify_layout=layout))
    assert backend.tables[1] == [4, 1] and backend.forward_metadata.cu_seqlens_q.tolist() == [0, 3, 3], "ragged"
    renaming = flash.backend()
    renaming.use_sliding_window_kv_pool = True
    assert spare_launches(renaming) and not prepares_in_graph(renaming)
    assert not spare_launches(FlashAttentionBackend(None)), "FlashAttention 4"
    assert not spare_launches(SimpleNamespace())
    monkeypatch.delitem(flash3.sys.modules, flash3.BACKENDS)
    assert not spare_launches(flash.backend()), "the module is not there"


@pytest.mark.parametrize("mode, copied", [("TARGET_VERIFY", False), ("EXTEND", True)])
def test_queries_of_blocks_are_read_where_the_projection_left_them(flash, mode, copied):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    backend = flash.backend()
    spare_launches(backend)
    rows = torch.randn(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
    q = rows[:, : HEADS * DIM]
    batch = SimpleNamespace(forward_mode=ForwardMode[mode])
    seen = backend.forward_extend(q, "k", "v", None, batch, True)
    assert backend.written == ("k", "v", True)
    assert type(seen) is Tensor and torch.equal(seen, q.reshape(WIDTH, HEADS, DIM))
    assert (seen.data_ptr() != q.data_ptr()) == copied
    # What follows is done with ordinary tensors.
    assert type(q + 1) is Tensor


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_replays_follow_the_lengths_and_queries_may_have_gaps_between_rows(causal):
    """Bit by bit what separate schedules over queries without gaps give."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    lengths = torch.tensor([17, 300, 4096], dtype=torch.int32, device="cuda")
    layer = call(lengths, 4096, "cuda", causal=causal)
    wide = torch.full((3 * WIDTH, HEADS + 2 * KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :HEADS] = layer["q"]
    shared = SharedSchedules(flash_attn_with_kvcache, get_scheduler_metadata)

    def forward() -> list[Tensor]:
        shared.begin(lengths)
        return [shared(**{**layer, "q": wide[:, :HEADS]}) for _ in range(4)]

    replay, outputs = captured(forward)
    for new in ([17, 300, 4096], [4096, 16, 1000], [20, 20, 20]):
        lengths.copy_(torch.tensor(new))
        for _ in range(2):  # a replay leaves the next one a fresh schedule
            replay()
        expected = flash_attn_with_kvcache(**layer)
        for output in outputs:
            torch.testing.assert_close(output, expected, rtol=0, atol=0)
