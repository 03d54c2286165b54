"""FlashAttention 3 over blocks: one schedule for the layers of a captured forward, queries read where they lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.patches import flash3
from dflash_sglang.patches.flash3 import SharedSchedules, spare_launches

HEADS, KV_HEADS, DIM, WIDTH = 32, 8, 128, 16


def call(lengths: torch.Tensor, context: int, device: str = "cpu", **other: Any) -> dict[str, Any]:
    """What SGLang's backend passes for one layer of blocks at these lengths [bs]."""
    bs, pages = len(lengths), len(lengths) * context + 1
    generator = torch.Generator(device).manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
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
        self.shared = SharedSchedules(self._attend, self._schedule)

    def _schedule(self, **arguments: Any) -> torch.Tensor:
        self.schedules.append(arguments)
        return torch.tensor(len(self.schedules))

    def _attend(self, **arguments: Any) -> None:
        self.used.append(arguments.get("scheduler_metadata"))


def test_layers_of_a_captured_forward_share_a_schedule_for_each_kind_of_layer():
    flash, lengths = Flash(), torch.tensor([40, 17], dtype=torch.int32)
    flash.shared.begin(lengths)
    for layer in (call(lengths, 64), call(lengths, 64, causal=False), call(lengths, 64)):
        flash.shared(**layer)
    assert [int(used) for used in flash.used] == [1, 2, 1]
    made = {key: value for key, value in flash.schedules[0].items() if not isinstance(value, torch.Tensor)}
    assert made == dict(
        batch_size=2, max_seqlen_q=WIDTH, max_seqlen_k=64, num_heads=HEADS, num_heads_k=KV_HEADS, headdim=DIM,
        headdim_v=DIM, qkv_dtype=torch.bfloat16, page_size=1, causal=True, has_softcap=False, num_splits=0,
    )  # fmt: skip
    flash.shared.begin(lengths)  # the next forward makes its own, within its own graph
    flash.shared(**call(lengths, 64))
    assert int(flash.used[-1]) == 3


def test_other_calls_keep_the_schedules_of_their_own():
    """Lengths in another tensor (an eager forward, another backend), a window, a schedule that is given."""
    flash, lengths = Flash(), torch.tensor([40, 17], dtype=torch.int32)
    flash.shared(**call(lengths, 64))
    flash.shared.begin(lengths)
    given = torch.tensor(99)
    flash.shared(**call(lengths.clone(), 64))
    flash.shared(**call(lengths, 64, window_size=(31, 0)))
    flash.shared(**call(lengths, 64, scheduler_metadata=given))
    assert flash.used == [None, None, None, given] and not flash.schedules


def test_layers_of_trees_share_a_schedule_over_prefixes():
    """Of calls that SGLang makes for causal blocks."""
    lengths, schedules, causal = torch.tensor([40, 17], dtype=torch.int32), [], []

    def attend(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
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

    use_mla = _disable_scheduler_metadata_precompute = False

    def __init__(self, schedule: Any) -> None:
        self._get_scheduler_metadata = schedule
        self.forward_metadata = SimpleNamespace(cache_seqlens_int32=torch.tensor([40]))

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.prepared = forward_batch

    def forward_extend(self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool) -> Any:
        self.written = (k, v, save)
        return q.contiguous().view(-1, HEADS, DIM)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Made-up kernels in a module with that backend."""
    kernels = Flash()
    module = SimpleNamespace(FlashAttentionBackend=FlashAttentionBackend, flash_attn_with_kvcache=kernels._attend)
    monkeypatch.setitem(flash3.sys.modules, flash3.BACKENDS, module)
    return SimpleNamespace(
        kernels=kernels, module=module, backend=lambda: FlashAttentionBackend(kernels._schedule)
    )


def test_flash_attention_3_alone_is_taken_hold_of(flash, monkeypatch):
    assert not spare_launches(FlashAttentionBackend(None)), "FlashAttention 4"
    assert not spare_launches(SimpleNamespace())
    monkeypatch.delitem(flash3.sys.modules, flash3.BACKENDS)
    assert not spare_launches(flash.backend()), "the module is not there"


def test_a_backend_begins_each_forward_that_it_prepares_inside_of_a_graph(flash):
    """Also as one of a target's two backends."""
    backends = [flash.backend(), flash.backend()]
    assert spare_launches(backends[0]) and spare_launches(SimpleNamespace(full_attn_backend=backends[1]))
    for backend in (*backends, backends[0]):
        backend.init_forward_metadata_in_graph("batch")
        assert backend.prepared == "batch"
        for _ in range(2):
            flash.module.flash_attn_with_kvcache(**call(backend.forward_metadata.cache_seqlens_int32, 64))
    assert [int(used) for used in flash.kernels.used] == [1, 1, 2, 2, 3, 3]


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
    assert type(seen) is torch.Tensor and torch.equal(seen, q.reshape(WIDTH, HEADS, DIM))
    assert (seen.data_ptr() != q.data_ptr()) == copied
    # What follows is done with ordinary tensors.
    assert type(q + 1) is torch.Tensor


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_replays_follow_the_lengths_and_equal_separate_schedules(causal):
    from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

    layers, context = 4, 4096
    lengths = torch.tensor([17, 300, 4096], dtype=torch.int32, device="cuda")
    layer = call(lengths, context, "cuda", causal=causal)
    shared = SharedSchedules(flash_attn_with_kvcache, get_scheduler_metadata)

    def forward() -> list[torch.Tensor]:
        shared.begin(lengths)
        return [shared(**layer) for _ in range(layers)]

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward()
    for new in ([17, 300, 4096], [4096, 16, 1000], [20, 20, 20]):
        lengths.copy_(torch.tensor(new))
        for _ in range(2):  # a replay leaves the next one a fresh schedule
            graph.replay()
        expected = flash_attn_with_kvcache(**layer)
        for output in outputs:
            torch.testing.assert_close(output, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu_queries_with_gaps_between_rows_give_the_same(causal):
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    layer = call(torch.tensor([17, 300], dtype=torch.int32, device="cuda"), 512, "cuda", causal=causal)
    wide = torch.full((2 * WIDTH, HEADS + 2 * KV_HEADS, DIM), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :HEADS] = layer["q"]
    expected = flash_attn_with_kvcache(**layer)
    got = flash_attn_with_kvcache(**{**layer, "q": wide[:, :HEADS]})
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
