"""Start-up's checks as functions of what is known of a launch: each mismatch is one problem (C23)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts, config_directory, tensor_facts
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.checkpoint.own_modules import OwnModules
from dflash_sglang.startup.facts import ServingFacts, TargetFacts
from dflash_sglang.startup.fit_checks import draft_problems
from dflash_sglang.startup.launch_checks import UNSERVED, UNSERVED_APART, launch_problems
from dflash_sglang.startup.serving_checks import serving_problems
from dflash_sglang.startup.vocabulary_checks import own_problems
from tests.support.reference_domino import OF_DOMINO
from tests.support.start_up import tells
from tests.support.tiny import draft_config, target_config, write_checkpoint

TARGET = TargetFacts.from_config(target_config())
FC = {"fc.weight": TensorFacts("F32", (64, 192))}
COORDINATION = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"


def ordinary(**changed: object) -> SimpleNamespace:
    """Server arguments of a launch that nothing is wrong with, and what is changed."""
    values = {row.field: row.off for row in (*UNSERVED, *UNSERVED_APART)}
    values |= {"attn_dp_size": 1, "extra_metric_labels": None}
    values |= {"disaggregation_mode": "null", "disaggregation_transfer_backend": "nixl"}
    return SimpleNamespace(**{**values, **changed})


def problems(
    target: TargetFacts = TARGET,
    draft_ranks: int = 1,
    tensors: dict[str, TensorFacts] = FC,
    serving: dict[str, Any] | None = None,
    **draft: Any,
) -> list[str]:
    spec = DraftSpec.from_config(draft_config(**draft), Flags((serving or {}).get("block_size")))
    facts = ServingFacts(draft_path="draft", draft_ranks=draft_ranks, **(serving or {}))
    return list(map(str, draft_problems(spec, target, facts, tensors, OwnModules())))


# ---- The draft, its target and its server ------------------------------------------------------------------

SLIDING = {"layer_types": ["sliding_attention"] * 2}
SINKS = {"dflash_config": {"attention_sink_bias": True}}
BLOCK, BACKEND = "--speculative-dflash-block-size", "--speculative-draft-attention-backend"
OTHER = "Serve the target that the draft was trained for."
TRTLLM = {"serving": {"draft_attention_backend": "trtllm_mha"}}
MLA = "layers.0.self_attn.kv_a_proj_with_mqa.weight"
SELECTOR = {"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 4, "selector_top_k": 4}}
LARGER = {"target": TargetFacts(5, 64, 384)}
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"dflash_config": {"mask_token_id": 320}}, "draft config mask_token_id=320: expected an id below the "
     "target's vocab_size of 320. Correct dflash_config.mask_token_id"),
    ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "draft config target_layer_ids=[1, 3, 5]: expected "
     "layers of the target, 0 to 4 (its last layer). Correct dflash_config.target_layer_ids, or serve its"),
    ({"dflash_config": {"target_layer_ids": [1, 3, 3]}}, "draft config target_layer_ids=[1, 3, 3]: expected each "
     "layer once. Correct dflash_config.target_layer_ids"),
    ({"tensors": {"fc.weight": TensorFacts("BF16", (64, 128))}}, "draft tensor fc.weight=[64, 128]: expected "
     "[64, 192]: [hidden_size, 3 target layers x hidden_size]. Make target_layer_ids name the layers the"),
    ({"target": TargetFacts(5, 128, 320)}, f"draft config hidden_size=64: expected the target's hidden_size of "
     f"128 (embedding and head are the target's). {OTHER}"),
    ({**LARGER, **SELECTOR}, f"draft config vocab_size=320: expected at least the target's vocab_size of 384 "
     f"(the selector has a row for each candidate). {OTHER}"),
    ({**LARGER, "architectures": ["Qwen3DSparkModel"], "markov_rank": 4}, "draft config vocab_size=320: expected "
     "at least ... (the Markov head has a row for each token)"),
    ({**LARGER, "dflash_config": OF_DOMINO}, "draft config vocab_size=320: expected at least ... (Domino's "
     "projector has a row for each token)"),
    ({"target": TargetFacts(6, 64, 320)}, f"draft config num_target_layers=5: expected the target's 6 layers. "
     f"{OTHER}"),
    ({"block_size": 1}, "draft config block_size=1: expected at least 2: the last committed token and one "
     "proposal. Correct it, or serve another draft."),
    ({"serving": {"block_size": 4, "widest": 5}}, "DFLASH_SGLANG_CONFIG width=5: expected at most 4, the block "
     "that is served; it may be served narrower, not wider. Lower it, or leave it out."),
    ({"serving": {"block_size": 1}}, f"{BLOCK}=1: expected at least 2: ... Set {BLOCK} to 2 or more"),
    ({"serving": {"block_size": 1, "block_flag": "--speculative-num-draft-tokens"}},
     "--speculative-num-draft-tokens=1: expected at least 2"),
    ({"serving": {"block_size": 9}}, f"{BLOCK}=9: expected at most the trained block of 8; beyond it proposals "
     f"are noise. Set {BLOCK} 8, or remove it."),
    ({"draft_ranks": 8}, "draft config num_attention_heads=4: expected divisible by the draft's tensor parallel "
     "size of 8. Change --tp-size or --attn-dp-size."),
    ({"draft_ranks": 4, "intermediate_size": 130}, "draft config intermediate_size=130: expected divisible by"),
    ({"draft_ranks": 4, "num_key_value_heads": 3, "num_attention_heads": 12},
     "draft config num_key_value_heads=3: expected divisible by ... of 4, or a divisor of it. Change --tp-size"),
    ({"tensors": {**FC, MLA: TensorFacts("BF16", (80, 64))}}, f"draft tensor {MLA}=[80, 64]: expected none of "
     f"multi-head latent attention (MLA): ... Serve a draft trained with grouped-query attention."),
    ({"serving": {"draft_attention_backend": "flex_attention"}}, f"{BACKEND}='flex_attention': expected one that "
     f"attends non-causally from the block: flashinfer, ... Set {BACKEND} to one of these, or remove it."),
    (TRTLLM, f"{BACKEND}='trtllm_mha': expected a backend for the draft's layers that are not causal: "
     f"flashinfer, fa3, fa4, triton. Set {BACKEND} to one of these, or remove it."),
    ({**TRTLLM, **SLIDING, "dflash_config": {"sliding_window_non_causal": True}},
     f"{BACKEND}='trtllm_mha': expected"),
    ({"serving": {"draft_reader": "flashinfer"}, **SINKS}, f"--attention-backend='flashinfer': expected a "
     f"backend for the draft's attention sinks (attention_sink_bias): fa3, fa4, triton. Set {BACKEND} to one of"),
    ({"serving": {"draft_reader": "trtllm_mha"}, **SINKS, **SLIDING}, "--attention-backend='trtllm_mha':"),
]  # fmt: skip
WITHOUT_A_PROBLEM: list[dict[str, Any]] = [
    {},
    {"dflash_config": {"target_layer_ids": [4, 0, 2]}},
    {"draft_ranks": 2},
    {"draft_ranks": 4},
    *({"serving": {"block_size": served}} for served in (2, 5, 8)),
    {"serving": {"draft_reader": "trtllm_mha"}, **SINKS},
    {**TRTLLM, "is_causal": True},
    {**TRTLLM, **SLIDING},
    # packed: left to the loader
    *({"tensors": {**FC, "layers.0.mlp.up_proj.weight": TensorFacts(dtype, (128, 8))}} for dtype in ("U8", "I32")),
    {"tensors": {"fc.weight": TensorFacts("U8", (64, 96))}},
    {"tensors": {"fc.weight_packed": TensorFacts("I32", (64, 24))}},
]  # fmt: skip


def test_a_mismatch_is_one_problem_and_what_fits_is_none() -> None:
    said = [(problems(**change), says) for change, says in ROWS]
    assert [one for one in said if len(one[0]) != 1 or not tells(one[0][0], one[1])] == []
    assert [(change, found) for change in WITHOUT_A_PROBLEM if (found := problems(**change))] == []
    assert list(serving_problems(ServingFacts(draft_path="draft"))) == []


def test_the_vocab_size_of_a_draft_that_borrows_embedding_and_head_is_used_by_nothing() -> None:
    for fields in ({}, {"draft_vocab_size": 320}):
        for target in (TargetFacts(5, 64, 300), TargetFacts(5, 64, 384)):
            assert problems(target=target, **fields) == []
            assert list(own_problems(DraftSpec.from_config(draft_config(**fields)), target, OwnModules())) == []


def test_the_target_is_described_by_its_text_config() -> None:
    nested = {"vocab_size": 1, "text_config": target_config(vocab_size=77, num_hidden_layers=9)}
    assert TargetFacts.from_config(nested) == TargetFacts(num_layers=9, hidden_size=64, vocab_size=77)


# ---- Flags -------------------------------------------------------------------------------------------------

# Every setting that has to have one value, by that value.
ONE_VALUE: tuple[tuple[object, str], ...] = (
    (1, "pp_size attn_cp_size dcp_size dwdp_size"),
    (False, "enable_prefill_cp enable_attn_tp_input_scattered enable_two_batch_overlap enable_pdmux use_ray "
     "enable_unified_memory enable_page_major_kv_layout enable_kv_cache_sharding enable_hisparse enable_lmcache "
     "enable_flexkv encoder_only prefill_only_disable_kv_cache enable_return_aux_hidden_states enable_mis "
     "speculative_use_block_verification enable_watermark enable_linear_replayssm enable_linear_replayssm_spec "
     f"{COORDINATION}"),
    (None, "elastic_ep_backend decrypted_draft_config_file dllm_algorithm debug_tensor_dump_input_file "
     "grammar_backend return_hidden_states_mode"),
    ("null", "decoupled_spec_role"), ("off", "weight_cache_mode"), ("none", "kv_canary"),
    (1.0, "speculative_accept_threshold_single speculative_accept_threshold_acc"),
)  # fmt: skip
# Of prefill and decode servers, too.
ONE_VALUE_APART: tuple[tuple[object, str], ...] = (
    (False, "disaggregation_decode_enable_offload_kvcache enable_streaming_session enable_return_routed_experts "
     "enable_return_indexer_topk"),
    ("early", "disaggregation_decode_allocation_policy"), (1.0, "disaggregation_decode_host_receive_threshold"),
)  # fmt: skip
OTHERS: dict[type, object] = {bool: True, int: 2, float: 0.5, str: "other", type(None): "other"}
OTHER_OF = {COORDINATION: True, "grammar_backend": "outlines"}
FLAGS = {COORDINATION: COORDINATION, "return_hidden_states_mode": "--enable-return-hidden-states"}


@pytest.mark.matrix(target="any", draft="any, in another launch", kv="any", outcome="refused")
def test_a_launch_that_this_worker_takes_no_part_in_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(COORDINATION, "1")
    assert list(launch_problems(ordinary())) == []  # of no effect without data-parallel attention
    failures = []
    for role, values, rows in (("null", ONE_VALUE, UNSERVED), ("decode", ONE_VALUE_APART, UNSERVED_APART)):
        off = {field: value for value, fields in values for field in fields.split()}
        assert off == {row.field: row.off for row in rows}
        for row in rows:
            other, setting = OTHER_OF.get(row.field, OTHERS[type(row.off)]), FLAGS.get(row.field)
            changed = {"attn_dp_size": 2} if row.field == COORDINATION else {row.field: other}
            said = [str(one) for one in launch_problems(ordinary(disaggregation_mode=role, **changed))]
            setting = setting or f"--{row.field.replace('_', '-')}"
            parts = f"{setting}={other!r}: expected  ...  with DFLASH: {row.why}. "
            fixes = any(
                f". {fix}" in said[0] for fix in (f"Remove {setting}", f"Set {setting}", "Serve the draft ")
            )
            failures += [] if len(said) == 1 and tells(said[0], parts) and fixes else [said]
    assert failures == []


def test_what_is_refused_of_a_prefill_or_a_decode_server_is_served_by_one_that_does_both() -> None:
    apart = {field: OTHERS[type(off)] for off, fields in ONE_VALUE_APART for field in fields.split()}
    assert list(launch_problems(ordinary(disaggregation_transfer_backend="mori", **apart))) == []
    assert list(launch_problems(ordinary(disaggregation_mode="prefill"))) == []


def test_a_draft_in_an_object_store_is_refused_with_what_to_do() -> None:
    with pytest.raises(
        OSError, match="s3://bucket/draft is not on this machine, .* Copy it here, or set SGLANG_PL"
    ):
        config_directory("s3://bucket/draft", None)


# ---- Tensors of layers -------------------------------------------------------------------------------------

LAYER: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = [
    ("self_attn.k_proj.weight", "F8_E4M3", (64, 64), (32, 64)),
    ("self_attn.v_proj.weight", "I8", (16, 64), (32, 64)),
    ("self_attn.qkv_proj.weight", "F32", (192, 64), (128, 64)),
    ("self_attn.q_proj.bias", "F32", (96,), (64,)),
    ("self_attn.attention_sink_bias", "F32", (8,), (4,)),
    ("mlp.down_proj.weight", "F32", (64, 256), (64, 128)),
]  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_tensor_of_a_layer_that_the_config_does_not_describe_is_named_with_both_shapes(prefix: str) -> None:
    sizes = "hidden_size 64, intermediate_size 128, 4 heads and 2 key-value heads of 16"
    for name, dtype, found, expected in LAYER:
        tensor = f"{prefix}layers.1.{name}"
        assert problems(tensors={**FC, tensor: TensorFacts(dtype, found)}) == [
            f"draft tensor {tensor}={list(found)}: expected {list(expected)}: {sizes}. "
            "Make config.json and the checkpoint agree."
        ]
        assert problems(tensors={**FC, tensor: TensorFacts(dtype, expected)}) == []


def test_a_wrong_size_in_the_config_names_a_few_of_its_tensors_and_counts_the_others() -> None:
    shapes = {"gate": (256, 64), "up": (256, 64), "down": (64, 256)}
    names = [f"layers.{i}.mlp.{name}_proj.weight" for i in range(2) for name in shapes]
    matrices = {name: TensorFacts("BF16", shapes[name.split(".")[3].split("_")[0]]) for name in names}
    assert problems(tensors=FC | matrices, intermediate_size=256) == []
    found = problems(tensors=FC | matrices)
    assert len(found) == 3 and all(
        tells(one, f"draft tensor {name}=") for one, name in zip(found, names, strict=False)
    )
    assert found[0].endswith("Make config.json and the checkpoint agree. 3 more tensors do not fit.")


# ---- Files -------------------------------------------------------------------------------------------------


def test_tensor_facts_come_from_the_headers_of_every_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, draft_config(), {"a": torch.zeros(2, 3, dtype=torch.bfloat16)})
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    write_checkpoint(tmp_path, draft_config(), {"b": torch.zeros(4)})
    assert tensor_facts(tmp_path) == {"a": TensorFacts("BF16", (2, 3)), "b": TensorFacts("F32", (4,))}
    assert tensor_facts(tmp_path / "absent") == {}
    # SGLang loads the files of an index only: others hold the same weights under other names.
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b": "model.safetensors"}}))
    assert tensor_facts(tmp_path) == {"b": TensorFacts("F32", (4,))}


def test_a_weights_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, draft_config(), {"a": torch.zeros(2, 3)})
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for kept in (0, 5, 40, -1):
        path.write_bytes(whole[:kept])
        with pytest.raises(DraftConfigError) as refused:
            tensor_facts(tmp_path)
        assert (refused.value.field, refused.value.value) == ("model.safetensors", f"{path.stat().st_size} bytes")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 64\n")
    with pytest.raises(DraftConfigError, match="git lfs pull"):
        tensor_facts(tmp_path)
