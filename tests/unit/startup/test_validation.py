"""Start-up refusals (C23): each row as a pure function, and all of them before a process is spawned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts, config_directory, tensor_facts
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.checkpoint.own_modules import OwnModules
from dflash_sglang.startup.facts import Problem, ServingFacts, TargetFacts
from dflash_sglang.startup.fit_checks import draft_problems
from dflash_sglang.startup.launch_checks import (
    COORDINATION,
    UNSERVED,
    UNSERVED_APART,
    launch_problems,
)
from dflash_sglang.startup.serving_checks import serving_problems
from dflash_sglang.startup.vocabulary_checks import own_problems
from tests.support.tiny import draft_config, make_pair, target_config, write_checkpoint

TARGET = TargetFacts.from_config(target_config())
FC = {"fc.weight": TensorFacts("F32", (64, 192))}


def ordinary(**changed: object) -> SimpleNamespace:
    """Server arguments of a launch that nothing is wrong with, and what is changed."""
    values = {row.field: row.off for row in (*UNSERVED, *UNSERVED_APART)}
    values |= {"attn_dp_size": 1, "extra_metric_labels": None}
    values |= {"disaggregation_mode": "null", "disaggregation_transfer_backend": "nixl"}
    return SimpleNamespace(**{**values, **changed})


def problems(
    target: TargetFacts = TARGET,
    draft_ranks: int = 1,
    tensors: dict[str, TensorFacts] | None = None,
    serving: dict[str, Any] | None = None,
    **draft: Any,
) -> list[Problem]:
    flags = Flags((serving or {}).get("block_size"))
    return draft_problems(
        DraftSpec.from_config(draft_config(**draft), flags),
        target,
        ServingFacts(draft_path="draft", draft_ranks=draft_ranks, **(serving or {})),
        FC if tensors is None else tensors,
        OwnModules(),
    )


def test_a_matching_draft_target_and_server_have_no_problem() -> None:
    assert problems() == []
    assert problems(dflash_config={"target_layer_ids": [4, 0, 2]}) == []
    assert list(serving_problems(ServingFacts(draft_path="draft"))) == []
    assert list(launch_problems(ordinary())) == []


@pytest.mark.parametrize("vocab_size", [300, 384])
@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 320}], ids=str)
def test_the_vocab_size_of_a_draft_that_borrows_embedding_and_head_is_used_by_nothing(
    vocab_size: int, fields: dict
) -> None:
    target = TargetFacts(5, 64, vocab_size)
    assert problems(target=target, **fields) == []
    spec = DraftSpec.from_config(draft_config(**fields))
    assert list(own_problems(spec, target, OwnModules())) == []


def test_the_target_is_described_by_its_text_config() -> None:
    nested = {"vocab_size": 1, "text_config": target_config(vocab_size=77, num_hidden_layers=9)}
    assert TargetFacts.from_config(nested) == TargetFacts(num_layers=9, hidden_size=64, vocab_size=77)


ROWS: dict[str, tuple[dict[str, Any], str, object]] = {
    "mask id outside the target's vocabulary": (
        {"dflash_config": {"mask_token_id": 320}},
        "draft config mask_token_id",
        320,
    ),
    "layer id out of range": (
        {"dflash_config": {"target_layer_ids": [1, 3, 5]}},
        "draft config target_layer_ids",
        [1, 3, 5],
    ),
    "negative layer id": (
        {"dflash_config": {"target_layer_ids": [-1, 3, 4]}},
        "draft config target_layer_ids",
        [-1, 3, 4],
    ),
    "duplicate layer id": (
        {"dflash_config": {"target_layer_ids": [1, 3, 3]}},
        "draft config target_layer_ids",
        [1, 3, 3],
    ),
    "fc of other features": (
        {"tensors": {"fc.weight": TensorFacts("BF16", (64, 128))}},
        "draft tensor fc.weight",
        [64, 128],
    ),
    "hidden size": ({"target": TargetFacts(5, 128, 320)}, "draft config hidden_size", 64),
    "vocabulary of a selector": (
        {
            "target": TargetFacts(5, 64, 384),
            "architectures": ["DFlash2DraftModel"],
            "dflash_config": {"selector_rank": 4, "selector_top_k": 4},
        },
        "draft config vocab_size",
        320,
    ),
    "number of target layers": ({"target": TargetFacts(6, 64, 320)}, "draft config num_target_layers", 5),
    "trained block of 1": ({"block_size": 1}, "draft config block_size", 1),
    "a width beyond the block": ({"serving": {"block_size": 4, "widest": 5}}, "DFLASH_SGLANG_CONFIG width", 5),
    "served block of 1": ({"serving": {"block_size": 1}}, "--speculative-dflash-block-size", 1),
    "served block of 1 by the other flag": (
        {"serving": {"block_size": 1, "block_flag": "--speculative-num-draft-tokens"}},
        "--speculative-num-draft-tokens",
        1,
    ),
    "served block above the trained one": (
        {"serving": {"block_size": 9}},
        "--speculative-dflash-block-size",
        9,
    ),
    "heads": ({"draft_ranks": 8}, "draft config num_attention_heads", 4),
    "columns of the MLP": (
        {"draft_ranks": 4, "intermediate_size": 130},
        "draft config intermediate_size",
        130,
    ),
    "key-value heads": (
        {"draft_ranks": 4, "num_key_value_heads": 3, "num_attention_heads": 12},
        "draft config num_key_value_heads",
        3,
    ),
    "MLA layers": (
        {"tensors": {**FC, "layers.0.self_attn.kv_a_proj_with_mqa.weight": TensorFacts("BF16", (80, 64))}},
        "draft tensor layers.0.self_attn.kv_a_proj_with_mqa.weight",
        [80, 64],
    ),
    "attention backend": (
        {"serving": {"draft_attention_backend": "flex_attention"}},
        "--speculative-draft-attention-backend",
        "flex_attention",
    ),
    "attention backend without non-causal full layers": (
        {"serving": {"draft_attention_backend": "trtllm_mha"}},
        "--speculative-draft-attention-backend",
        "trtllm_mha",
    ),
    "attention backend with other windows in non-causal layers": (
        {
            "serving": {"draft_attention_backend": "trtllm_mha"},
            "layer_types": ["sliding_attention"] * 2,
            "dflash_config": {"sliding_window_non_causal": True},
        },
        "--speculative-draft-attention-backend",
        "trtllm_mha",
    ),
    "sinks and the target's attention backend": (
        {"serving": {"draft_reader": "flashinfer"}, "dflash_config": {"attention_sink_bias": True}},
        "--attention-backend",
        "flashinfer",
    ),
    "a block of 1 that a flag gives": (
        {"serving": {"block_size": 1}, "block_size": None},
        "--speculative-dflash-block-size",
        1,
    ),
}


@pytest.mark.parametrize(("change", "field", "value"), ROWS.values(), ids=ROWS.keys())
def test_a_mismatch_is_one_problem_that_names_field_value_expectation_and_fix(
    change: dict[str, Any], field: str, value: object
) -> None:
    (problem,) = problems(**change)
    assert (problem.field, problem.value) == (field, value)
    assert str(problem).startswith(f"{field}={value!r}: expected ") and problem.fix in str(problem)


SERVING_ROWS: dict[str, tuple[ServingFacts, str, object]] = {
    "no draft": (ServingFacts(None), "--speculative-draft-model-path", None),
    "a target in GGUF": (
        ServingFacts("draft", draft_as_gguf=True),
        "--speculative-draft-load-format",
        None,
    ),
}


@pytest.mark.parametrize(("serving", "field", "value"), SERVING_ROWS.values(), ids=SERVING_ROWS.keys())
def test_a_server_that_cannot_run_any_draft_is_one_problem(
    serving: ServingFacts, field: str, value: object
) -> None:
    (problem,) = serving_problems(serving)
    assert (problem.field, problem.value) == (field, value)


# What the built-in worker serves.
ELSEWHERE = {"use_ray", "decrypted_draft_config_file", "speculative_use_block_verification"}
LAUNCH_ROWS = {
    "pp_size": (
        2,
        "--pp-size=2: expected 1 with DFLASH: one rank has all of the target's layers. Remove",
    ),
    "attn_cp_size": (2, "--attn-cp-size=2: expected 1 with DFLASH: the target's features and the slots of all"),
    "enable_prefill_cp": (True, "--enable-prefill-cp=True: expected unset with DFLASH: the target's features and"),
    "dcp_size": (2, "--dcp-size=2: expected 1 with DFLASH: the target's features and the slots of all tokens"),
    "enable_attn_tp_input_scattered": (True, "--enable-attn-tp-input-scattered=True: expected unset with DFLASH"),
    "enable_two_batch_overlap": (
        True,
        "--enable-two-batch-overlap=True: expected unset with DFLASH: SGLang",
    ),
    "enable_pdmux": (True, "--enable-pdmux=True: expected unset with DFLASH: its loop runs the target without"),
    "decoupled_spec_role": ("drafter", "--decoupled-spec-role='drafter': expected 'null' with DFLASH: draft and"),
    "elastic_ep_backend": ("mooncake", "--elastic-ep-backend='mooncake': expected unset with DFLASH: ranks that"),
    "dwdp_size": (
        2,
        "--dwdp-size=2: expected 1 with DFLASH: SGLang has no speculative decoding with it. Remove",
    ),
    COORDINATION: (True, f"{COORDINATION}=True: expected unset with DFLASH: data-parallel ranks prefill together"),
    "decrypted_draft_config_file": (
        "plain.json",
        "--decrypted-draft-config-file='plain.json': expected unset with DFLASH: it reads",
    ),
    "use_ray": (True, "--use-ray=True: expected unset with DFLASH: SGLang's Ray actors load no plugins"),
    "enable_unified_memory": (True, "--enable-unified-memory=True: expected unset with DFLASH: context KV is"),
    "enable_page_major_kv_layout": (
        True,
        "--enable-page-major-kv-layout=True: expected unset with DFLASH:",
    ),
    "enable_kv_cache_sharding": (
        True,
        "--enable-kv-cache-sharding=True: expected unset with DFLASH:",
    ),
    "enable_hisparse": (True, "--enable-hisparse=True: expected unset with DFLASH: SGLang stages and commits"),
    "enable_lmcache": (True, "--enable-lmcache=True: expected unset with DFLASH: it restores the target's keys"),
    "enable_flexkv": (True, "--enable-flexkv=True: expected unset with DFLASH: it restores the target's keys"),
    "weight_cache_mode": ("client", "--weight-cache-mode='client': expected 'off' with DFLASH: SGLang's weight"),
    "encoder_only": (
        True,
        "--encoder-only=True: expected unset with DFLASH: the server encodes images for others",
    ),
    "dllm_algorithm": (
        "LowConfidence",
        "--dllm-algorithm='LowConfidence': expected unset with DFLASH: a diffusion",
    ),
    "prefill_only_disable_kv_cache": (
        True,
        "--prefill-only-disable-kv-cache=True: expected unset with DFLASH: a decode step reads",
    ),
    "debug_tensor_dump_input_file": (
        "ids.npy",
        "--debug-tensor-dump-input-file='ids.npy': expected unset with DFLASH: the server ends after one prefill",
    ),
    "enable_return_aux_hidden_states": (
        True,
        "--enable-return-aux-hidden-states=True: expected unset with DFLASH: it captures the target's layers",
    ),
    "kv_canary": ("log", "--kv-canary='log': expected 'none' with DFLASH: its start-up captures"),
    "grammar_backend": ("outlines", "--grammar-backend='outlines': expected xgrammar or llguidance with DFLASH"),
    "enable_mis": (True, "--enable-mis=True: expected unset with DFLASH: SGLang scores several items at once"),
    "return_hidden_states_mode": ("last", "--enable-return-hidden-states='last': expected unset with DFLASH:"),
    "speculative_accept_threshold_single": (
        0.5,
        "--speculative-accept-threshold-single=0.5: expected 1.0 with DFLASH: its output is exactly",
    ),
    "speculative_accept_threshold_acc": (
        0.5,
        "--speculative-accept-threshold-acc=0.5: expected 1.0 with DFLASH: its output is exactly",
    ),
    "speculative_use_block_verification": (
        True,
        "--speculative-use-block-verification=True: expected unset with DFLASH: it accepts token by token",
    ),
    "enable_watermark": (True, "--enable-watermark=True: expected unset with DFLASH: it does not watermark."),
    "enable_linear_replayssm": (True, "--enable-linear-replayssm=True: expected unset with DFLASH: this package"),
    "enable_linear_replayssm_spec": (
        True,
        "--enable-linear-replayssm-spec=True: expected unset with DFLASH: this",
    ),
}

APART_ROWS = {
    "disaggregation_decode_enable_offload_kvcache": (
        True,
        "--disaggregation-decode-enable-offload-kvcache=True: expected unset with DFLASH: it restores",
    ),
    "disaggregation_decode_allocation_policy": (
        "prefill_complete",
        "--disaggregation-decode-allocation-policy='prefill_complete': expected 'early' with DFLASH: with",
    ),
    "disaggregation_decode_host_receive_threshold": (
        0.5,
        "--disaggregation-decode-host-receive-threshold=0.5: expected 1.0 with DFLASH: with --disaggregation-mode",
    ),
    "enable_streaming_session": (
        True,
        "--enable-streaming-session=True: expected unset with DFLASH: with --disagg",
    ),
    "enable_return_routed_experts": (
        True,
        "--enable-return-routed-experts=True: expected unset with DFLASH: with --disaggregation-mode it is",
    ),
    "enable_return_indexer_topk": (
        True,
        "--enable-return-indexer-topk=True: expected unset with DFLASH: with --disaggregation-mode it is",
    ),
}


@pytest.mark.matrix(target="any", draft="any, in another launch", kv="any", outcome="refused")
@pytest.mark.parametrize(
    ("role", "field", "value", "says"),
    [
        *(("null", row.field, *LAUNCH_ROWS[row.field]) for row in UNSERVED),
        *(("decode", row.field, *APART_ROWS[row.field]) for row in UNSERVED_APART),
    ],
    ids=[*LAUNCH_ROWS, *APART_ROWS],
)
def test_a_launch_that_this_worker_takes_no_part_in_is_refused_with_the_reason(
    role: str, field: str, value: object, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if field == COORDINATION:
        monkeypatch.setenv(COORDINATION, "1")
        assert list(launch_problems(ordinary())) == []  # of no effect without data-parallel attention
    changed = {"attn_dp_size": 2} if field == COORDINATION else {field: value}
    (problem,) = launch_problems(ordinary(disaggregation_mode=role, **changed))
    assert str(problem).startswith(says)
    offers_the_built_in_worker = "SGLANG_PLUGINS=none: SGLang's built-in worker serves it" in problem.fix
    assert offers_the_built_in_worker == (field in ELSEWHERE)
    assert problem.fix.startswith((f"Remove {problem.field}", "Serve the draft with a config.json", "Set --"))


def test_what_is_refused_of_a_prefill_or_a_decode_server_is_served_by_one_that_does_both() -> None:
    apart = {field: value for field, (value, _) in APART_ROWS.items()}
    assert list(launch_problems(ordinary(disaggregation_transfer_backend="mori", **apart))) == []
    assert list(launch_problems(ordinary(disaggregation_mode="prefill"))) == []


def test_a_draft_in_an_object_store_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        OSError, match="s3://bucket/draft is not on this machine, .* Copy it here, or set SGLANG_PL"
    ):
        config_directory("s3://bucket/draft", None)


@pytest.mark.parametrize("served", [2, 5, 8])
def test_a_served_block_up_to_the_trained_one_is_accepted(served: int) -> None:
    assert problems(serving={"block_size": served}) == []


def test_sinks_are_no_problem_where_sglang_takes_another_backend_than_the_targets() -> None:
    sinks = {"dflash_config": {"attention_sink_bias": True}}
    assert problems(serving={"draft_reader": "trtllm_mha"}, **sinks) == []
    sliding = {"layer_types": ["sliding_attention"] * 2}
    (kept,) = problems(serving={"draft_reader": "trtllm_mha"}, **sinks, **sliding)
    assert (kept.field, kept.value) == ("--attention-backend", "trtllm_mha")


@pytest.mark.parametrize("causality", [{"is_causal": True}, {"layer_types": ["sliding_attention"] * 2}])
def test_trtllm_mha_serves_drafts_whose_layers_are_all_causal(causality: dict) -> None:
    assert problems(serving={"draft_attention_backend": "trtllm_mha"}, **causality) == []


@pytest.mark.parametrize("tp", [2, 4])
def test_key_value_heads_may_be_replicated_over_more_ranks_than_there_are(tp: int) -> None:
    assert problems(draft_ranks=tp) == []


LAYER_ROWS: dict[str, tuple[str, str, tuple[int, ...], tuple[int, ...]]] = {
    "rows of q": ("self_attn.q_proj.weight", "BF16", (96, 64), (64, 64)),
    "rows of k": ("self_attn.k_proj.weight", "F8_E4M3", (64, 64), (32, 64)),
    "rows of v, too few": ("self_attn.v_proj.weight", "I8", (16, 64), (32, 64)),
    "columns of o": ("self_attn.o_proj.weight", "F32", (64, 128), (64, 64)),
    "a stack of q, k and v": ("self_attn.qkv_proj.weight", "F32", (192, 64), (128, 64)),
    "a bias": ("self_attn.q_proj.bias", "F32", (96,), (64,)),
    "a norm of other heads": ("self_attn.q_norm.weight", "F32", (32,), (16,)),
    "sinks of other heads": ("self_attn.attention_sink_bias", "F32", (8,), (4,)),
    "rows of gate": ("mlp.gate_proj.weight", "F16", (256, 64), (128, 64)),
    "columns of up": ("mlp.up_proj.weight", "F32", (128, 128), (128, 64)),
    "columns of down": ("mlp.down_proj.weight", "F32", (64, 256), (64, 128)),
}


@pytest.mark.parametrize(("name", "dtype", "found", "expected"), LAYER_ROWS.values(), ids=LAYER_ROWS.keys())
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_tensor_of_a_layer_that_the_config_does_not_describe_is_named_with_both_shapes(
    prefix: str, name: str, dtype: str, found: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    tensor = f"{prefix}layers.1.{name}"
    (problem,) = problems(tensors={**FC, tensor: TensorFacts(dtype, found)})
    assert (problem.field, problem.value) == (f"draft tensor {tensor}", list(found))
    assert problem.expected == (
        f"{list(expected)}: hidden_size 64, intermediate_size 128, 4 heads and 2 key-value heads of 16"
    )
    assert problems(tensors={**FC, tensor: TensorFacts(dtype, expected)}) == []


def test_a_wrong_size_in_the_config_names_a_few_of_its_tensors_and_counts_the_others() -> None:
    matrices = {
        f"layers.{i}.mlp.{name}_proj.weight": TensorFacts("BF16", shape)
        for i in range(2)
        for name, shape in {"gate": (256, 64), "up": (256, 64), "down": (64, 256)}.items()
    }
    assert problems(tensors=FC | matrices, intermediate_size=256) == []
    found = problems(tensors=FC | matrices)
    assert [problem.field for problem in found] == [f"draft tensor {name}" for name in list(matrices)[:3]]
    assert found[0].fix == "Make config.json and the checkpoint agree. 3 more tensors do not fit."


@pytest.mark.parametrize("dtype", ["U8", "I32", "I64"])
def test_packed_tensors_of_a_layer_are_left_to_the_loader(dtype: str) -> None:
    assert problems(tensors={**FC, "layers.0.mlp.up_proj.weight": TensorFacts(dtype, (128, 8))}) == []


def test_the_fc_of_a_packed_quantisation_is_left_to_the_loader() -> None:
    assert problems(tensors={"fc.weight": TensorFacts("U8", (64, 96))}) == []
    assert problems(tensors={"fc.weight_packed": TensorFacts("I32", (64, 24))}) == []
    assert problems(tensors={"model.fc.weight": TensorFacts("F32", (64, 64))}) != []


def test_tensor_facts_come_from_the_headers_of_every_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, draft_config(), {"a": torch.zeros(2, 3, dtype=torch.bfloat16)})
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    write_checkpoint(tmp_path, draft_config(), {"b": torch.zeros(4)})
    assert tensor_facts(tmp_path) == {"a": TensorFacts("BF16", (2, 3)), "b": TensorFacts("F32", (4,))}
    assert tensor_facts(tmp_path / "absent") == {}
    # SGLang loads the files of an index only: others hold the same weights under other names.
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "model.safetensors"}}))
    assert tensor_facts(tmp_path) == {"b": TensorFacts("F32", (4,))}


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_weights_file_that_is_not_whole_is_named(tmp_path: Path, kept: int) -> None:
    write_checkpoint(tmp_path, draft_config(), {"a": torch.zeros(2, 3)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DraftConfigError) as refused:
        tensor_facts(tmp_path)
    assert (refused.value.field, refused.value.value) == ("model.safetensors", f"{path.stat().st_size} bytes")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 64\n")
    with pytest.raises(DraftConfigError, match="git lfs pull"):
        tensor_facts(tmp_path)


# ---- The launcher ------------------------------------------------------------------------------------------

# Draft overrides, extra arguments, environment -> what the message has to contain.
LAUNCHES: dict[str, tuple[dict[str, Any] | None, list[str], list[str]]] = {
    "no draft": (None, [], ["--speculative-draft-model-path=None"]),
    "several at once": (
        {"block_size": 1, "num_target_layers": 6, "dflash_config": {"mask_token_id": 320}},
        ["--pp-size", "2"],
        [
            "--pp-size=2",
            "block_size=1",
            "num_target_layers=6",
            "mask_token_id=320",
        ],
    ),
    "prefill and decode apart": (
        {},
        ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "mori"],
        ["--disaggregation-transfer-backend='mori'", "mooncake, mooncake_tcp, nixl, fake", "SGLANG_PLUGINS=none"],
    ),
    "context parallel": (
        {},
        ["--tp-size", "4", "--attn-cp-size", "2", "--dcp-size", "2"],
        ["--attn-cp-size=2", "--dcp-size=2"],
    ),
    "two-batch overlap": ({}, ["--enable-two-batch-overlap"], ["--enable-two-batch-overlap=True"]),
    "multiplexing": ({}, ["--enable-pdmux"], ["--enable-pdmux=True"]),
    "mask id": ({"dflash_config": {"mask_token_id": 320}}, [], ["mask_token_id=320", "vocab_size of 320"]),
    "layer ids": (
        {"dflash_config": {"target_layer_ids": [5, -1, 5]}},
        [],
        ["[5, -1, 5]", "0 to 4", "each layer once"],
    ),
    "fc": ({"dflash_config": {"target_layer_ids": [0, 1]}}, [], ["fc.weight=[64, 192]", "[64, 128]"]),
    "hidden size": ({"hidden_size": 32}, [], ["hidden_size=32", "hidden_size of 64"]),
    "target layers": ({"num_target_layers": 6}, [], ["num_target_layers=6", "5 layers"]),
    "served block": (
        {},
        ["--speculative-dflash-block-size", "9"],
        ["--speculative-dflash-block-size=9", "8"],
    ),
    "draft tokens": ({}, ["--speculative-num-draft-tokens", "1"], ["--speculative-num-draft-tokens=1"]),
    "draft tokens beyond the block": (
        {},
        ["--speculative-num-draft-tokens", "9"],
        ["--speculative-num-draft-tokens=9", "Set --speculative-num-draft-tokens 8, or remove it."],
    ),
    "a block of none": (
        {},
        ["--speculative-dflash-block-size", "0"],
        ["--speculative-dflash-block-size=0", "to 2 or more"],
    ),
    "the target's quantisation": (
        {},
        ["--quantization", "awq"],
        ["--quantization='awq'", "Set --speculative-draft-model-quantization unquant"],
    ),
    "a grammar backend that cannot go back": (
        {},
        ["--grammar-backend", "outlines"],
        ["--grammar-backend='outlines'", "Set --grammar-backend xgrammar"],
    ),
    "thresholds": (
        {},
        ["--speculative-accept-threshold-acc", "0.5"],
        ["--speculative-accept-threshold-acc=0.5", "exactly the target's"],
    ),
    "an encrypted config": (
        {},
        ["--decrypted-draft-config-file", "plain.json"],
        ["--decrypted-draft-config-file='plain.json'", "SGLANG_PLUGINS=none"],
    ),
    "a malformed quantisation": (
        {"quantization_config": "fp8"},
        [],
        ["quantization_config='fp8': expected an object with a quant_method"],
    ),
    "a string of architectures": (
        {"architectures": "DFlashDraftModel"},
        [],
        ["architectures='DFlashDraftModel': expected a DFLASH draft: "],
    ),
    "a draft that is not there": (
        None,
        ["--speculative-draft-model-path", "/nowhere/draft"],
        ["--speculative-draft-model-path='/nowhere/draft': expected a DFlash", "Correct it: no such directory"],
    ),
    "a draft that is a file": (
        None,
        ["--speculative-draft-model-path", __file__],
        [f"--speculative-draft-model-path='{__file__}'", "is a file."],
    ),
    "heads": ({"num_attention_heads": 3}, ["--tp-size", "2"], ["num_attention_heads=3", "size of 2"]),
    "backend": (
        {},
        ["--speculative-draft-attention-backend", "flashinfer"],
        ["--speculative-draft-attention-backend='flashinfer'", "torch_native"],
    ),
    "a target in GGUF": (
        {},
        ["--load-format", "gguf"],
        ["--speculative-draft-load-format=None: expected the draft's own format", "load-format auto"],
    ),
    "window": ({"sliding_window": None}, [], ["sliding_window=None", "add sliding_window"]),
    "number of layer types": ({"num_hidden_layers": 3}, [], ["layer_types=", "3 layer types"]),
    "layer type": (
        {"layer_types": ["full_attention", "linear"]},
        [],
        ["layer_types[1]='linear'", "full_attention"],
    ),
    "quantised weights": (
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        [],
        ["quantization_config='awq'", "need a CUDA GPU"],
    ),
    "required": (
        {"architectures": ["Lfm2DSparkDraftModel"]},
        [],
        ["DFLASH_SGLANG_REQUIRE=1", "Lfm2DSparkDraftModel", "built-in DFlashWorkerV2 serves it"],
    ),
}

RUN_LAUNCHES = """
import json, os, sys
from sglang.srt.plugins import load_plugins

load_plugins()
from sglang.srt.server_args import prepare_server_args

outcomes = {}
for name, argv in json.load(open(sys.argv[1])).items():
    os.environ["DFLASH_SGLANG_REQUIRE"] = "1" if name == "required" else "0"
    try:
        prepare_server_args(argv).resolve_once()
        outcomes[name] = "started"
    except (Exception, SystemExit) as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
json.dump(outcomes, open(sys.argv[2], "w"))
"""

ENVIRONMENT = {**os.environ, "SGLANG_PLATFORM": "dflash_cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def launch_arguments(target: Path, draft: Path | None, extra: list[str]) -> list[str]:
    arguments = [
        "--model-path",
        str(target),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--skip-tokenizer-init",
    ]
    arguments += ["--speculative-algorithm", "DFLASH", *extra]
    return arguments if draft is None else [*arguments, "--speculative-draft-model-path", str(draft)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each launch ended with, from one process that resolves their arguments one after the other."""
    root = tmp_path_factory.mktemp("launches")
    target, draft = make_pair(root / "pair")
    launches = {"good": launch_arguments(target, draft, [])}
    for i, (name, (overrides, extra, _)) in enumerate(LAUNCHES.items()):
        directory = None
        if overrides is not None:
            directory = root / f"draft{i}"
            directory.mkdir()
            (directory / "config.json").write_text(json.dumps(draft_config(**overrides)))
            (directory / "model.safetensors").symlink_to(draft / "model.safetensors")
        launches[name] = launch_arguments(target, directory, extra)
    (root / "launches.json").write_text(json.dumps(launches))
    command = [sys.executable, "-c", RUN_LAUNCHES, str(root / "launches.json"), str(root / "outcomes.json")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((root / "outcomes.json").read_text())


@pytest.mark.slow
def test_a_good_launch_passes_the_launcher(outcomes: dict[str, str]) -> None:
    assert outcomes["good"] == "started"


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_bad_launch_ends_in_the_launcher_with_every_problem(outcomes: dict[str, str], name: str) -> None:
    message = outcomes[name]
    assert message.startswith("SystemExit" if name == "required" else "StartupError: DFLASH cannot start:")
    for part in LAUNCHES[name][2]:
        assert part in message


@pytest.mark.slow
def test_the_server_exits_before_it_spawns_a_process(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path, draft={"num_target_layers": 6})
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *launch_arguments(target, draft, ["--port", "1"]),
    ]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert "draft config num_target_layers=6: expected the target's 5 layers" in done.stderr
    assert "Load weight begin" not in done.stdout + done.stderr
