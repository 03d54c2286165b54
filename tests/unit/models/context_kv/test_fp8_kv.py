"""fp8 KV of the draft: the same bytes for context and block (C6), and what cannot be served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from dflash_sglang.attention.torch_cpu import TorchCpuAttention
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.startup.facts import ServingFacts
from dflash_sglang.startup.fit_checks import pool_problems
from dflash_sglang.startup.serving_checks import kv_problems
from tests.support import sglang_layers as layers

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
BLOCK = 8


@layers.cpu_only
@pytest.mark.parametrize(
    ("fmt", "scales"), [(None, None), *((fmt, of) for fmt in FORMATS for of in (None, (0.37, 2.5)))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_context_rows_and_block_rows_have_the_same_bytes_and_are_read_with_their_scales(
    tmp_path, dtype, fmt, scales
):
    """The same rows once as context and once as a block, in the pool that the CPU platform's attention reads. fmt:
    of the pool, None for the model's dtype."""
    model = layers.make_draft(tmp_path, dtype, attention_bias=True)
    pool = layers.make_pool(model, slots=40, dtype=fmt or dtype)
    attention = model.layers[1].self_attn  # full and not causal
    if scales is not None:
        for layer in model.layers:
            layer.self_attn.attn.k_scale, layer.self_attn.attn.v_scale = map(torch.tensor, scales)
    rows = torch.randn(BLOCK, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    positions = torch.arange(BLOCK)
    of_block, of_context = torch.arange(1, 1 + BLOCK), torch.arange(21, 21 + BLOCK)
    context = ContextKV(model, "per_layer")
    context.bind(pool)
    context.project = lambda features: features
    context.write(rows, positions, of_context)

    runner: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=of_block[None].int()), token_to_kv_pool=pool
    )
    attended: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Attention(TorchCpuAttention):
        def forward_extend(self, q, *rest, **more):
            attended.append((q, super().forward_extend(q, *rest, **more)))
            return attended[-1][1]

    backend = Attention(runner)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([0]),
        out_cache_loc=of_block,
        spec_info=SimpleNamespace(draft_token_num=BLOCK, ragged_verify_layout=None),
    )
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
        attention(positions, rows, batch)
        unrounded = layers.context_key_value(attention, rows, positions)
    for buffer in pool.get_kv_buffer(1):
        bytes_ = buffer.view(torch.uint8)
        assert torch.equal(bytes_[of_block], bytes_[of_context])

    ((q, got),) = attended
    exact_k, exact_v = (x.float().view(BLOCK, 2, 16).repeat_interleave(2, 1) for x in unrounded)
    scores = torch.einsum("qhd,khd->hqk", q.float().view(BLOCK, 4, 16), exact_k) * attention.attn.scaling
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), exact_v).reshape(BLOCK, -1)
    assert (got.float() - wanted).norm() < (0.12 if fmt == torch.float8_e5m2 else 0.06) * wanted.norm()


OWN, TARGETS = "--speculative-draft-kv-cache-dtype", "--kv-cache-dtype"
UNWRITTEN, UNREAD = (
    "expected for the draft one of auto, bf16,",
    "expected a format that the draft's attention backend",
)
# fmt: off
REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a format that context KV is not written in": (
        {"draft_kv_dtype": "mxfp8"}, f"{OWN}='mxfp8': {UNWRITTEN}", "the target's may stay as it is"),
    "the target's format, which the draft follows": (
        {"kv_dtype": "nvfp4"}, f"{TARGETS}='nvfp4': {UNWRITTEN}", f"Set {OWN} bf16 or fp8_e4m3"),
    "e5m2 read by FA3": (
        {"draft_kv_dtype": "fp8_e5m2", "draft_reader": "fa3"},
        f"{OWN}='fp8_e5m2': {UNREAD} fa3", "fp8_e5m2 is read by flashinfer, triton"),
    "the target's e5m2 read by FA3": (
        {"kv_dtype": "fp8_e5m2", "draft_reader": "fa3"}, f"{TARGETS}='fp8_e5m2': {UNREAD} fa3", f"{OWN} bf16"),
    "fp8 read by FA4": (
        {"draft_kv_dtype": "fp8_e4m3", "draft_reader": "fa4"},
        f"{OWN}='fp8_e4m3': {UNREAD} fa4", "fp8_e4m3 is read by fa3, flashinfer, triton"),
}
SERVED = [
    {},
    {"kv_dtype": "nvfp4", "draft_kv_dtype": "bf16"},
    {"kv_dtype": "fp8_e4m3", "draft_reader": "fa4"},  # SGLang gives this draft a pool of the model's dtype
    {"kv_dtype": "fp8_e5m2", "draft_reader": "flashmla"},  # no draft runs on it: SGLang takes another
    {"kv_dtype": "fp8_e5m2", "draft_reader": "flashinfer"},
    {"draft_kv_dtype": "fp8_e4m3", "draft_reader": "fa3"},
]
# fmt: on


@pytest.mark.parametrize(
    ("serving", "says", "fix"),
    [
        pytest.param(
            *refusal, id=name, marks=pytest.mark.matrix(draft="z-lab", kv=f"draft KV: {name}", outcome="refused")
        )
        for name, refusal in REFUSALS.items()
    ],
)
def test_a_format_that_cannot_be_served_is_one_problem(serving, says, fix):
    (problem,) = kv_problems(ServingFacts("draft", **serving))
    assert str(problem).startswith(says) and fix in str(problem)


def test_formats_that_can_be_served_are_no_problem():
    assert [serving for serving in SERVED if list(kv_problems(ServingFacts("draft", **serving)))] == []


@pytest.mark.matrix(
    draft="z-lab, is_hybrid_swa", outcome="refused", message="draft config is_hybrid_swa=True: expected false"
)
def test_a_draft_that_asks_for_a_hybrid_pool_of_its_own_is_one_problem():
    for config in ({"is_hybrid_swa": True}, {"text_config": {"is_hybrid_swa": True}}):
        (problem,) = pool_problems(config)
        assert str(problem).startswith(
            "draft config is_hybrid_swa=True: expected false: context KV is written into"
        )
        assert "Remove it from the draft's config.json" in str(problem)
    assert list(pool_problems({"is_hybrid_swa": False})) == []


@pytest.mark.gpu
@pytest.mark.skipif(layers.DEVICE == "cpu", reason="needs a CUDA GPU: the write of all layers")
@pytest.mark.parametrize("scales", [None, (0.37, 2.5)], ids=["no scales", "scales"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_write_of_all_layers_stores_the_bytes_of_the_write_per_layer_captured_too(tmp_path, fmt, scales):
    model = layers.make_draft(tmp_path, torch.bfloat16, attention_bias=True)
    if scales is not None:
        for layer in model.layers:
            layer.self_attn.attn.k_scale, layer.self_attn.attn.v_scale = (torch.tensor(s).cuda() for s in scales)
    pool = layers.make_pool(model, slots=60, dtype=fmt)
    context = ContextKV(model)
    context.bind(pool)
    if scales is not None:
        assert "one write per layer (the pool's scales are not 1" in context.reason
        return
    assert context.reason.endswith("one write for all layers")
    features = torch.randn(5, 192, device="cuda").bfloat16()
    positions = torch.tensor([0, 1, 70, 300, 4000], device="cuda")
    slots = torch.arange(1, 6, device="cuda")
    context.write(features, positions, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context.write(features, positions, slots)
    features.copy_(torch.randn_like(features))
    slots.add_(10)
    graph.replay()
    context.write(features, positions, slots + 10)
    context._writer = None  # the same projection, then layer by layer
    context.write(features, positions, slots + 20)
    for layer in (0, 1):
        for buffer in pool.get_kv_buffer(layer):
            bytes_ = buffer.view(torch.uint8)
            assert torch.equal(bytes_[slots], bytes_[slots + 10]), "captured and eager"
            assert torch.equal(bytes_[slots + 10], bytes_[slots + 20]), "all layers and one by one"
