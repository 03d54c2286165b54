"""What start-up decides for a launch: copies, rings of the draft's rows, a draft read in fp8, the graphs of
prefills; and why not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.kernels.context.rings import RingShape
from dflash_sglang.settings.plugin_config import PluginConfig, PluginConfigError
from dflash_sglang.startup import copying, fp8_drafts, prefill_graphs
from dflash_sglang.startup.draft_kv import needs_whole_pool, ring_shape
from dflash_sglang.startup.fp8_drafts import LEAST_WEIGHTS, obstacle
from tests.support.tiny import draft_config

# ---- Copies of a request's own text ------------------------------------------------------------------------

PLAIN, MTP = object.__new__(DraftSpec), object.__new__(MtpSpec)
HOST_CACHE = {"hierarchical_cache": True}
Settle = Callable[..., PluginConfig]


@pytest.fixture
def settle(monkeypatch: pytest.MonkeyPatch) -> Settle:
    """Settings of this package, in a launch with these of SGLang's."""

    def settled(
        settings: dict[str, Any], hierarchical_cache: bool = False, mode: str = "null", length: float = -1.0
    ) -> PluginConfig:
        memory = SimpleNamespace(enable_hierarchical_cache=hierarchical_cache)
        monkeypatch.setattr(copying, "SIMULATE_ACC_LEN", length)
        monkeypatch.setattr(copying, "get_memory", lambda: memory)
        monkeypatch.setattr(copying, "get_disagg", lambda: SimpleNamespace(disaggregation_mode=mode))
        return PluginConfig.from_mapping(settings)

    return settled


def test_copies_are_proposed_where_asked_for_and_where_tokens_of_slots_are_known(settle: Settle) -> None:
    for settings, launch, reason in (
        ({}, {}, None),
        ({"copy": "off"}, HOST_CACHE, 'copy is "off"'),
        ({"copy": "block"}, {}, None),
        ({"copy": 64}, {}, None),
        ({}, HOST_CACHE, "--enable-hierarchical-cache brings KV without its tokens"),
        ({"copy": "block"}, {"length": 6.4}, "acceptance is forced, whatever is proposed"),
        ({}, {"mode": "decode"}, None),
        ({"copy": "block"}, {"mode": "prefill"}, "another server decodes"),
    ):
        assert copying.why_no_copies(settle(settings, **launch), PLAIN) == reason
    config = settle({})
    assert copying.why_no_copies(config, MTP) == "no test copies with multi-token-prediction layers"
    assert copying.chains_of(config, MTP, 4) == {}
    # chains have more rows than a block
    for copy, block, launch, chains in (
        (64, 16, {}, {32: 4, 64: 2}),
        ("auto", 32, {}, {64: 2}),
        (64, 64, {}, {}),
        (64, 16, HOST_CACHE, {}),
        ("block", 16, {}, {}),
    ):
        assert copying.chains_of(settle({"copy": copy}, **launch), PLAIN, block) == chains

    for value, shown in ((32, r"32 \(int\)"), ("64", r"'64' \(str\)")):
        with pytest.raises(PluginConfigError, match=f"copy={shown}: expected one of auto, off, block, 64"):
            PluginConfig.from_mapping({"copy": value})
    assert str(copying.more_rows_problem("steps have one width only")) == (
        "DFLASH_SGLANG_CONFIG copy=64: expected 'block', because steps have one width only. Set it to 'block'."
    )
    assert str(copying.renamed_slots_problem("block")) == (
        "DFLASH_SGLANG_CONFIG copy='block': expected 'off' with KV pools that rename slots. Leave it out."
    )


# ---- Rings of the draft's rows -----------------------------------------------------------------------------

SLIDING = dict(layer_types=["sliding_attention"] * 2, sliding_window=100)


def chosen(
    config: dict[str, Any] | None = None,
    draft: dict[str, Any] = SLIDING,
    page: int = 1,
    window: int | None = None,
    sinks: int | None = None,
    whole_for: str | None = None,
) -> RingShape | str:
    spec = DraftSpec.from_config(draft_config(**draft))
    settings = PluginConfig.from_mapping({"draft_kv": "auto", "width": {"trees": []}, **(config or {})})
    return ring_shape(spec, settings, 8, page, window, sinks, whole_for)


def test_rings_have_the_window_and_room_for_two_blocks_and_the_pool_is_whole_for_a_reason() -> None:
    assert chosen() == RingShape(100, 1, 116)
    assert chosen(page=16) == RingShape(100, 16, 160)  # 116, and 15 at both ends
    assert chosen(draft={}, window=40, sinks=0) == RingShape(40, 1, 56)
    assert chosen(window=40) == RingShape(40, 1, 56)
    assert chosen({"width": {"trees": [16, 32]}}) == RingShape(100, 1, 140)
    assert chosen({"width": {}}) == RingShape(100, 1, 172)  # trees of 64 nodes

    by_slots = "takes the draft's rows by the target's slots"
    assert chosen({"draft_kv": "whole"}) == 'draft_kv is "whole"'
    assert chosen(draft={}) == "layer 1 of the draft sees the whole context"
    first_tokens = "--speculative-draft-sink-size keeps the first tokens of every request"
    assert chosen(window=40, sinks=4) == first_tokens
    assert chosen(whole_for=needs_whole_pool(True, "null")) == f"--enable-hierarchical-cache {by_slots}"
    assert chosen(whole_for=needs_whole_pool(False, "decode")) == f"--disaggregation-mode decode {by_slots}"
    assert needs_whole_pool(False, "null") is None and needs_whole_pool(False, None) is None


# ---- Drafts that are read in fp8 ---------------------------------------------------------------------------

LARGE: dict[str, Any] = dict(  # Qwen3-8B's
    hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8, head_dim=128
)
HOPPER = (9, 0)
# q, k, v: 4096 x 6144; o: 4096 x 4096; gate, up and down: 3 x 4096 x 12288
MEAN = (4096 * (6144 + 4096) + 3 * 4096 * 12288) / 4


def matrices(dtype: str = "BF16") -> dict[str, TensorFacts]:
    return {"norm.weight": TensorFacts("F32", (4096,)), "fc.weight": TensorFacts(dtype, (4096, 20480))}


def reason(ranks: int = 1, dtype: str = "auto", capability: tuple[int, int] = HOPPER, **config: Any) -> str | None:
    tensors = config.pop("tensors", matrices())
    spec = DraftSpec.from_config(draft_config(**{**LARGE, **config}))
    return obstacle(spec, tensors, ranks, dtype, capability)


def test_large_dense_drafts_are_read_in_fp8_and_the_reason_is_told_why_others_are_not() -> None:
    assert reason() is None and reason(ranks=2, dtype="bfloat16") is None
    assert reason(capability=(8, 9)) is None and reason(capability=(12, 0), tensors=matrices("F16")) is None
    assert MEAN / 2 >= LEAST_WEIGHTS > MEAN / 4  # the bound is of a rank's average
    for facts, says in (
        (dict(capability=(8, 0)), "a GPU of compute capability 8.0 has no fp8 GEMM"),
        (dict(dtype="float32"), "--dtype float32"),
        (dict(tensors=matrices("F32")), "matrices are F32, not bfloat16 or float16"),
        (dict(tensors=matrices("F8_E4M3")), "matrices are F8_E4M3, not"),
        (dict(tensors={}), "unknown before they are loaded"),
        (dict(quantization_config={"quant_method": "awq"}), "the checkpoint is quantised (awq)"),
        (dict(ranks=4), f"have {MEAN / 4 / 2**20:.1f} Mi weights on a rank on average, less than 16"),
        (dict(hidden_size=2048, intermediate_size=6144), "less than 16"),
        (dict(dflash_config={"use_gemma_norm": True}), "a draft of this family in accept length has not been"),
    ):
        assert says in str(reason(**facts)), facts


def test_whatever_was_asked_for_stands_and_fp8_is_asked_for_as_by_the_flag(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a large draft on a Hopper GPU."""
    monkeypatch.setattr(fp8_drafts, "resolving_view", lambda args: args)
    monkeypatch.setattr(fp8_drafts, "draft_config", lambda path, revision: draft_config(**LARGE))
    monkeypatch.setattr(fp8_drafts, "weights_directory", lambda path, revision, download_dir: path)
    monkeypatch.setattr(fp8_drafts, "tensor_facts", lambda directory: matrices())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    declare = mock.Mock()
    monkeypatch.setattr(fp8_drafts, "declare_resolution", declare)
    caplog.set_level(logging.INFO, logger="dflash_sglang")
    method, explicit = "speculative_draft_model_quantization", "_speculative_draft_quantization_explicitly_set"
    unset = ("download_dir", method, "speculative_dflash_block_size")
    unset += ("speculative_num_draft_tokens", "speculative_draft_window_size")
    values = dict.fromkeys(unset) | dict(device="cuda", dtype="auto", tp_size=1, attn_dp_size=1, attn_cp_size=1)
    values |= {
        "speculative_draft_model_path": "draft",
        "speculative_draft_model_revision": "main",
        explicit: False,
    }
    for changed, says in (
        ({explicit: True}, ""),  # unquant
        ({explicit: True, method: "awq"}, ""),
        ({method: "fp8"}, ""),  # --quantization fp8
        ({"device": "cpu"}, ""),
        ({"tp_size": 8, "attn_dp_size": 2}, "as they are, not in fp8: its linear layers have"),  # of many ranks
        ({}, "in fp8; --speculative-draft-model-quantization unquant keeps them as they are"),
    ):
        assert not declare.called
        caplog.clear()
        fp8_drafts.quantise_where_shorter(SimpleNamespace(**{**values, **changed}))
        assert says in caplog.text and bool(says) == bool(caplog.text), changed
    assert declare.call_args.kwargs == {method: "fp8", explicit: True}


# ---- The graphs of prefills --------------------------------------------------------------------------------

USUAL_SIZES = [4, 8, 12, 16]
UNTESTED = "enable_lora", "enable_mixed_chunk", "enable_hierarchical_cache", "enable_deterministic_inference"


@pytest.fixture
def settled_graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PhaseConfig]:
    """Backend and sizes of the prefills' graphs that a launch on one GPU gets, in which something differs."""

    def settled(
        flags: Mapping[str, Any] = {}, target: Mapping[str, Any] = {}, graphs: Mapping[str, Any] = {}
    ) -> PhaseConfig:
        config = CudaGraphConfig()
        config.prefill = PhaseConfig(backend="breakable", bs=USUAL_SIZES)
        for name, value in graphs.items():
            setattr(config.prefill, name, value)
        off = dict.fromkeys(UNTESTED, False)
        args = SimpleNamespace(
            **{**off, "device": "cuda", "tp_size": 1, "pp_size": 1, "disaggregation_mode": "null",
               "attention_backend": "fa3", "prefill_attention_backend": None, "decode_attention_backend": None,
               "cuda_graph_config": config, "_cuda_graph_config_locked": {("prefill", name) for name in graphs},
               **flags}
        )  # fmt: skip
        whole = dict(attention_arch=AttentionArch.MHA, is_hybrid_swa=False, sliding_window_size=None)
        model = SimpleNamespace(**{**whole, "is_multimodal": False, "recurrent": None, **target})
        monkeypatch.setattr(prefill_graphs, "resolving_view", lambda server_args: server_args)
        monkeypatch.setattr(prefill_graphs, "resolved_view", lambda server_args: server_args)
        monkeypatch.setattr(prefill_graphs, "model_config_of", lambda server_args: model)
        monkeypatch.setattr(prefill_graphs, "mambaish_config", lambda config: config.recurrent)
        monkeypatch.setattr(prefill_graphs, "declare_resolution", lambda of, name, **new: vars(of).update(new))
        prefill_graphs.settle_prefill_graphs(args)
        return args.cuda_graph_config.prefill

    return settled


def test_prefill_graphs_are_of_whole_forwards_where_that_is_tested(
    settled_graphs: Callable[..., PhaseConfig], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = settled_graphs()
    assert (whole.backend, whole.bs) == ("full", [2, *USUAL_SIZES]), "what a cached prompt leaves has a graph"
    assert "prefill graphs: of the whole forward; --cuda-graph-backend-prefill chooses" in caplog.text
    for differs, reason in (
        (dict(flags={"attention_backend": "flashinfer"}), "attention is flashinfer's, and whole forwards are"),
        (dict(flags={"prefill_attention_backend": "triton"}), "attention is triton's, and whole forwards are"),
        (dict(flags={"tp_size": 2}), "no test has whole forwards on several ranks"),
        (dict(flags={"pp_size": 2}), "no test has whole forwards on several ranks"),
        (dict(target={"attention_arch": AttentionArch.MLA}), "without keys and values for each head"),
        (dict(target={"recurrent": object()}), "without keys and values for each head"),
        (dict(target={"sliding_window_size": 512}), "the target has sliding windows"),
        (dict(target={"is_hybrid_swa": True}), "the target has sliding windows"),
        (dict(target={"is_multimodal": True}), "prompts may hold more than text"),
        *((dict(flags={flag: True}), f"with --{flag.replace('_', '-')};") for flag in UNTESTED),
        (dict(flags={"disaggregation_mode": "prefill"}), "no test has whole forwards on a prefill server"),
    ):
        caplog.clear()
        found = settled_graphs(**differs)
        assert (found.backend, found.bs) == ("breakable", [2, *USUAL_SIZES]), differs
        assert "as SGLang has them, because" in caplog.text and reason in caplog.text, differs


def test_prefill_graphs_that_the_user_chose_stay(settled_graphs: Callable[..., PhaseConfig]) -> None:
    for graphs, expected in (
        ({"bs": [1, 64]}, ("full", [1, 64])),
        ({"bs": None}, ("full", None)),
        ({"backend": "breakable"}, ("breakable", [2, *USUAL_SIZES])),
        ({"backend": "disabled"}, ("disabled", USUAL_SIZES)),
        ({"backend": "tc_piecewise"}, ("tc_piecewise", USUAL_SIZES)),
    ):
        found = settled_graphs(graphs=graphs)
        assert (found.backend, found.bs) == expected, graphs
