"""DraftSpec from every spelling of a DFlash config.json (C9, C12), and PluginConfig's schema."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3Config

from dflash_sglang.checkpoint import DraftSpec, LayerAttention, RopeSpec
from dflash_sglang.checkpoint.families import foreign
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig, PluginConfigError
from dflash_sglang.settings.width import WidthConfig
from tests.support.reference_dflash2 import dflash2_config
from tests.support.reference_dspark import dspark_config
from tests.support.tiny import draft_config

FULL, SLIDING = "full_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def spec(**overrides: Any) -> DraftSpec:
    return DraftSpec.from_config(draft_config(**overrides))


def read_as(spec: DraftSpec, names: Any) -> dict[str, Any]:
    """The fields of a spec, or of its parts, with these names; "windows" and "kinds" are of its layers."""
    parts = (spec, spec.rope, spec.vocabulary, spec.convolution, spec.dflash2)
    of_layers = {"windows": [one.window for one in spec.layers], "kinds": [one.kind for one in spec.layers]}
    return {
        name: of_layers[name] if name in of_layers else next(getattr(p, name) for p in parts if hasattr(p, name))
        for name in names
    }


# ---- Layers ------------------------------------------------------------------------------------------------

# (is_causal, dflash_config.causal, sliding_window_non_causal) -> (full layer causal, sliding layer causal)
CAUSALITY = {
    (None, None, None): (False, True),
    (None, None, False): (False, True),
    (None, None, True): (False, False),
    **{(None, causal, below): (causal, causal) for causal in (True, False) for below in (None, True, False)},
    **{(top, *below): (top, top) for top in (True, False) for below in product((None, True, False), repeat=2)},
}


def test_causality_of_each_layer_kind_follows_the_first_flag_that_is_present() -> None:
    for (is_causal, causal, sliding), expected in CAUSALITY.items():
        for nested in (True, False):
            inner, top = {"causal": causal}, {"is_causal": is_causal}
            (inner if nested else top)["sliding_window_non_causal"] = sliding
            slides, full = spec(dflash_config=inner, **top).layers
            assert (full.causal, slides.causal) == expected, (is_causal, causal, sliding, nested)


# What is said in place of layer_types -> whether the sliding layers are causal.
WITHOUT_LAYER_TYPES: list[tuple[dict[str, Any], bool]] = [
    ({"dflash_config": {"use_swa": True}}, False),
    ({"use_sliding_window": True, "max_window_layers": 0}, False),
    ({"dflash_config": {"use_swa": True, "sliding_window_non_causal": False}}, True),
    ({"dflash_config": {"use_swa": True}, "sliding_window_non_causal": True}, False),
    ({"dflash_config": {"use_swa": True, "causal": True}}, True),
    ({"dflash_config": {"use_swa": True}, "is_causal": True}, True),
    ({"dflash_config": {"use_swa": True, "causal": True}, "is_causal": False}, False),
]


def test_without_layer_types_no_layer_is_causal_unless_a_flag_says_so() -> None:
    for fields, causal in WITHOUT_LAYER_TYPES:
        assert spec(layer_types=None, **fields).layers == (LayerAttention(SLIDING, causal, 16),) * 2, fields
    assert spec().layers == (LayerAttention(SLIDING, True, 16), LayerAttention(FULL, False, None))


def test_without_layer_types_the_layers_are_those_of_transformers_qwen3() -> None:
    for window in (
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 9},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": False, "max_window_layers": 1},
    ):
        config = {**draft_config(layer_types=None), **window}
        expected = Qwen3Config(**config)
        windows = [expected.sliding_window if kind == SLIDING else None for kind in expected.layer_types]
        read = read_as(DraftSpec.from_config(config), ("kinds", "windows"))
        assert read == {"kinds": expected.layer_types, "windows": windows}, window


# ---- Every other field -------------------------------------------------------------------------------------

NESTED_SIZES = {"hidden_size": 96, "head_dim": 24}
UNNESTED = {"mask_token_id": None, "target_layer_ids": None, "num_target_layers": 36}
MODELOPT = {"quant_algo": "W4A16_NVFP4"}
GPT_OSS: dict[str, Any] = {"model_type": "gpt_oss", "rope_parameters": YARN}
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # the window counts the current token and comes from any of its names
    ({"layer_types": None, "sliding_window": None, "dflash_config": {"use_swa": True, "swa_window_size": 9}},
     {"windows": [9, 9]}),
    ({"sliding_window": None, "dflash_config": {"sliding_window": 7}}, {"windows": [7, None]}),
    # one that no layer uses, as Hugging Face writes it into every Qwen3 config
    ({"layer_types": None, "sliding_window": 4096}, {"windows": [None, None], "kinds": [FULL, FULL]}),
    ({**GPT_OSS, "layer_types": None, "sliding_window": 128}, {"windows": [None, None], "kinds": [FULL, FULL]}),
    # nested first, then the top level
    ({"block_size": 16, "dflash_config": {"block_size": 8, "mask_token_id": 5}},
     {"block_size": 8, "mask_token_id": 5, "target_layer_ids": (1, 3, 4)}),
    ({"block_size": 16, "mask_token_id": 0, "target_layer_ids": [2, 0], "num_target_layers": None,
      "dflash_config": UNNESTED}, {"block_size": 16, "mask_token_id": 0, "target_layer_ids": (2, 0),
      "num_target_layers": 36}),
    ({"text_config": NESTED_SIZES}, NESTED_SIZES),
    # defaults of the published format, and of the class of the config's model
    ({"num_key_value_heads": None, "rms_norm_eps": None}, {"num_kv_heads": 4, "rms_norm_eps": 1e-6}),
    ({**GPT_OSS, "rms_norm_eps": None}, {"rms_norm_eps": 1e-5}),
    ({**GPT_OSS, "rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-6}),
    # what scales and what is quantised
    ({}, {"attention_value_scale": None, "quantization": None, "dflash2": None}),
    ({"dflash_config": {"attention_value_scale": 0.612}}, {"attention_value_scale": 0.612}),
    ({"quantization_config": MODELOPT}, {"quantization": "W4A16_NVFP4"}),
]  # fmt: skip


def test_a_field_is_read_from_each_of_its_places() -> None:
    for fields, expected in READ:
        assert read_as(spec(**fields), expected) == expected, fields


def test_a_dflash2_scales_as_its_own_object_says() -> None:
    for scaled, expected in (
        ({}, {"logit_multiplier": 1, "logit_softcap": None, "embedding_scale": 1}),
        ({"output_multiplier": 2, "final_logit_softcapping": 30.0, "input_embedding_scale": 8.0},
         {"logit_multiplier": 2, "logit_softcap": 30, "embedding_scale": 8}),
    ):  # fmt: skip
        read = DraftSpec.from_config(dflash2_config(final_logit_softcapping=15.0, dflash_config=scaled))
        assert read_as(read, expected) == expected and not any(layer.causal for layer in read.layers)


def test_without_a_head_dim_it_is_transformers() -> None:
    for model_type in ("qwen3", "llama"):
        config = draft_config(head_dim=None, model_type=model_type)
        assert DraftSpec.from_config(config).head_dim == AutoConfig.for_model(**config).head_dim


def test_a_flag_gives_what_the_config_leaves_out() -> None:
    for fields, flags, block, rows in (
        ({}, Flags(4), 8, 8),  # the config wins
        ({"block_size": None}, Flags(16), 16, 16),
        ({"sample_from_anchor": True}, Flags(4), 9, 8),
        ({"sample_from_anchor": True, "block_size": None}, Flags(16), 16, 15),
    ):
        read = DraftSpec.from_config(draft_config(**fields), flags)
        assert (read.block_size, read.draft_rows(read.block_size)) == (block, rows)
    for window, expected in ((16, 16), (None, 33)):
        read = DraftSpec.from_config(draft_config(sliding_window=window), Flags(window=33))
        assert [layer.window for layer in read.layers] == [expected, None]


def test_flags_are_read_off_a_command_line() -> None:
    for words, expected in {
        "--speculative-dflash-block-size 16 --tp-size 2": Flags(16),
        "--speculative-num-draft-tokens=8 --speculative-draft-window-size=512": Flags(8, 512),
        "--speculative-num-draft-tokens 8 --speculative-dflash-block-size": Flags(8),
        "--speculative-dflash-block-size many": Flags(),
    }.items():
        assert Flags.of_words(words.split()) == expected


# ---- Whose row proposes ------------------------------------------------------------------------------------

FAMILIES = {
    "plain": draft_config,
    "DFlash2": dflash2_config,
    "Laguna": lambda **fields: draft_config(architectures=["DFlashLagunaForCausalLM"], **fields),
    "DSpark": lambda **fields: dspark_config(**{"block_size": 8, **fields}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_anchors_row_proposes_by_either_name_in_every_place(family: str) -> None:
    unsaid = FAMILIES[family]()
    for name in ("sample_from_anchor", "query_zero_predicts_next", "shift_label"):
        for value in (True, False, None):
            first = family == "DSpark" if value is None else value
            for config in (
                {**unsaid, name: value},
                {**unsaid, "dflash_config": {**unsaid["dflash_config"], name: value}},
                {**unsaid, "eagle_config": {name: value}},
                {**unsaid, "text_config": {name: value}},
            ):
                read = DraftSpec.from_config(config)
                assert foreign(config) is None
                assert (read.anchor_proposes, read.block_size, read.draft_rows(5)) == (first, 8 + first, 5 - first)


# ---- The rotary embedding ----------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 2}
QUARTER = {"partial_rotary_factor": 0.25}
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, **QUARTER}  # of a multimodal target
# fields -> base, scaling, rotated dimensions of 16, halves against each other
ROPES: list[tuple[dict[str, Any], tuple[float, Any, int, bool]]] = [
    ({"rope_theta": 1, "rope_parameters": {"rope_theta": 7.0}}, (7.0, None, 16, True)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, (2e4, None, 16, True)),
    ({"rope_scaling": YARN}, (1e4, YARN, 16, True)),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, (1e4, LINEAR, 16, True)),
    ({"rope_parameters": {**YARN, "rope_theta": 3.0}, "rope_scaling": YARN}, (3.0, YARN, 16, True)),
    ({"partial_rotary_factor": 0.5}, (1e4, None, 8, True)),
    # Inside it was copied from the target: the trainers' Qwen3 rotates the whole head.
    ({"rope_parameters": QUARTER}, (1e4, None, 16, True)),
    ({"rope_scaling": {**QUARTER, "type": "default"}}, (1e4, None, 16, True)),
    ({"rope_parameters": YARN, "partial_rotary_factor": 0.5}, (1e4, YARN, 8, True)),
    ({"rope_scaling": {"rope_dim": 12, **QUARTER}}, (1e4, None, 12, True)),
    ({"is_neox_style": False}, (1e4, None, 16, False)),
    ({"rope_is_neox_style": False, "is_neox_style": True}, (1e4, None, 16, False)),
    *(({"rope_parameters": {"rope_type": kind, "rope_theta": 1e7, **MROPE}}, (1e7, None, 16, True))
      for kind in ("mrope", "default")),
    ({"rope_scaling": {"rope_type": "mrope", **MROPE, "rope_dim": 4}}, (1e4, None, 4, True)),
]  # fmt: skip


def test_rope_is_read_from_every_spelling() -> None:
    for fields, expected in ROPES:
        assert spec(**fields).rope == RopeSpec(*expected), fields


# Fields of a config -> what it means, where transformers' class fills in what they leave out.
GPT_OSS_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
MODEL_TYPES: list[tuple[str | None, dict[str, Any], tuple[float, Any]]] = [
    ("gpt_oss", {}, (150000.0, GPT_OSS_YARN)),
    ("gpt_oss", {"rope_theta": 7.0}, (7.0, GPT_OSS_YARN)),
    ("gpt_oss", {"rope_scaling": YARN}, (150000.0, YARN)),
    ("gpt_oss", {"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, (7.0, None)),
    ("minimax_m2", {}, (5e6, None)),
    ("glm4_moe", {}, (1e4, None)),  # its class has a partial factor, inside
    ("llama", {}, (1e4, None)),
    (None, {}, (1e4, None)),
]


def test_a_rope_that_is_left_out_is_the_one_of_the_models_class() -> None:
    for model_type, given, expected in MODEL_TYPES:
        rope = spec(model_type=model_type, **{"rope_theta": None, **given}).rope
        assert (rope.theta, rope.scaling, rope.rotary_dim) == (*expected, 16), model_type
        if model_type is not None:
            params = AutoConfig.for_model(model_type, **given).rope_parameters
            assert (rope.theta, (rope.scaling or {}).get("factor")) == (params["rope_theta"], params.get("factor"))


# ---- The plugin's settings ---------------------------------------------------------------------------------


def test_the_plugin_config_is_read_inline_and_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps({"context_kv": "per_layer"}))
    for source, expected in (
        (None, PluginConfig(context_kv="auto", draft_head="auto", width=WidthConfig(), proposals="auto")),
        (' {"context_kv": "stacked"} ', PluginConfig(context_kv="stacked")),
        (str(path), PluginConfig(context_kv="per_layer")),
        ('{"width": 4}', PluginConfig(width=WidthConfig(fixed=4))),
        ('{"width": "block"}', PluginConfig(width=WidthConfig(fixed="block"))),
        ('{"width": "auto"}', PluginConfig()),
        ('{"width": {"trees": [16]}}', PluginConfig(width=WidthConfig(trees=(16,)))),
        ('{"draft_head": "as_is"}', PluginConfig(draft_head="as_is")),
    ):
        assert PluginConfig.from_env({} if source is None else {CONFIG_ENV: source}) == expected, source
    for setting, plain, selector in (("auto", False, True), ("argmax", False, False), ("drawn", True, True)):
        config = PluginConfig.from_mapping({"proposals": setting})
        assert (config.draws(joint=False), config.draws(joint=True)) == (plain, selector)


def test_a_plugin_config_outside_the_schema_is_an_error_that_names_the_key() -> None:
    for source, message in (
        ('{"context_kvs": "auto"}', "unknown key 'context_kvs'. Known keys: context_kv"),
        ('{"context_kv": "fast"}', "context_kv='fast'.*expected one of auto, stacked, per_layer"),
        ('{"draft_head": ["fp8"]}', r"draft_head=\['fp8'\] \(list\).*expected one of auto, as_is, fp8"),
        ('{"width": 0}', r"DFLASH_SGLANG_CONFIG: width: fixed=0 \(int\): expected a whole number from 1 to"),
        ('{"width": "wide"}', r"width: fixed='wide' \(str\): expected .*'block' for that, or 'tree N'"),
        ('{"width": {"ragged": true}}', "width: unknown key 'ragged'. Known keys: widths, fixed"),
        ('{"width": {"trees": [1]}}', r"width: trees=1 \(int\): expected whole numbers from 2 to 64"),
        ("{", "is not JSON"),
        ("/nowhere/plugin.json", "neither inline JSON.*nor a readable file"),
    ):
        with pytest.raises(PluginConfigError, match=message):
            PluginConfig.from_env({CONFIG_ENV: source})
