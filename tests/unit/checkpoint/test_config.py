"""DraftSpec from every spelling of a plain DFlash config.json (C9, C12), and PluginConfig's schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig, Qwen3Config

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec, LayerAttention, RopeSpec
from dflash_sglang.checkpoint.families import foreign
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.settings.plugin_config import PluginConfig, PluginConfigError
from dflash_sglang.settings.width import WidthConfig
from tests.support.draft_formats import speculators_config
from tests.support.reference_dflash2 import dflash2_config
from tests.support.reference_domino import OF_DOMINO
from tests.support.reference_dspark import dspark_config
from tests.support.tiny import draft_config


def spec(**overrides: Any) -> DraftSpec:
    return DraftSpec.from_config(draft_config(**overrides))


# (is_causal, dflash_config.causal, sliding_window_non_causal) -> (full layer causal, sliding layer causal)
CAUSALITY = {
    (None, None, None): (False, True),
    (None, None, False): (False, True),
    (None, None, True): (False, False),
    (None, True, None): (True, True),
    (None, True, False): (True, True),
    (None, True, True): (True, True),
    (None, False, None): (False, False),
    (None, False, False): (False, False),
    (None, False, True): (False, False),
    **{(True, causal, sliding): (True, True) for causal in (None, True, False) for sliding in (None, True, False)},
    **{
        (False, causal, sliding): (False, False)
        for causal in (None, True, False)
        for sliding in (None, True, False)
    },
}


@pytest.mark.parametrize("sliding_flag_nested", [False, True])
@pytest.mark.parametrize(("flags", "expected"), CAUSALITY.items(), ids=str)
def test_causality_of_each_layer_kind_follows_the_first_flag_that_is_present(
    flags: tuple, expected: tuple, sliding_flag_nested: bool
) -> None:
    is_causal, causal, non_causal_sliding = flags
    nested: dict[str, Any] = {"causal": causal}
    top: dict[str, Any] = {"is_causal": is_causal}
    (nested if sliding_flag_nested else top)["sliding_window_non_causal"] = non_causal_sliding
    sliding, full = spec(dflash_config=nested, **top).layers
    assert (full.causal, sliding.causal) == expected


def test_a_full_layer_stays_non_causal_when_only_sliding_layers_are_causal() -> None:
    assert spec().layers == (
        LayerAttention("sliding_attention", causal=True, window=16),
        LayerAttention("full_attention", causal=False, window=None),
    )


# What is said in place of layer_types -> whether the sliding layers are causal.
WITHOUT_LAYER_TYPES = [
    ({"dflash_config": {"use_swa": True}}, False),
    ({"use_swa": True}, False),
    ({"use_sliding_window": True, "max_window_layers": 0}, False),
    ({"dflash_config": {"use_swa": True, "sliding_window_non_causal": False}}, True),
    ({"dflash_config": {"use_swa": True}, "sliding_window_non_causal": True}, False),
    ({"dflash_config": {"use_swa": True, "causal": True}}, True),
    ({"dflash_config": {"use_swa": True}, "is_causal": True}, True),
    ({"dflash_config": {"use_swa": True, "causal": True}, "is_causal": False}, False),
]


@pytest.mark.parametrize(("fields", "causal"), WITHOUT_LAYER_TYPES, ids=str)
def test_without_layer_types_no_layer_is_causal_unless_a_flag_says_so(fields: dict, causal: bool) -> None:
    assert spec(layer_types=None, **fields).layers == (LayerAttention("sliding_attention", causal, 16),) * 2


def test_the_window_counts_the_current_token_and_comes_from_any_of_its_names() -> None:
    only_swa = spec(layer_types=None, sliding_window=None, dflash_config={"use_swa": True, "swa_window_size": 9})
    assert [layer.window for layer in only_swa.layers] == [9, 9]
    nested = spec(sliding_window=None, dflash_config={"sliding_window": 7})
    assert [layer.window for layer in nested.layers] == [7, None]
    # A window that no layer uses, as Hugging Face writes it into every Qwen3 config.
    assert (
        spec(layer_types=None, sliding_window=4096).layers == (LayerAttention("full_attention", False, None),) * 2
    )


@pytest.mark.parametrize(
    "window",
    [
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 9},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": False, "max_window_layers": 1},
    ],
    ids=str,
)
def test_without_layer_types_the_layers_are_those_of_transformers_qwen3(window: dict) -> None:
    config = {**draft_config(layer_types=None), **window}
    expected = Qwen3Config(**config)
    layers = DraftSpec.from_config(config).layers
    assert [layer.kind for layer in layers] == expected.layer_types
    assert [layer.window for layer in layers] == [
        expected.sliding_window if kind == "sliding_attention" else None for kind in expected.layer_types
    ]


def test_without_a_head_dim_it_is_transformers() -> None:
    for model_type in ("qwen3", "llama"):
        config = draft_config(head_dim=None, model_type=model_type)
        assert DraftSpec.from_config(config).head_dim == AutoConfig.for_model(**config).head_dim


def test_block_size_mask_and_layer_ids_are_read_nested_first_and_then_from_the_top_level() -> None:
    nested = spec(block_size=16, dflash_config={"block_size": 8, "mask_token_id": 5})
    assert (nested.block_size, nested.mask_token_id, nested.target_layer_ids) == (8, 5, (1, 3, 4))
    top = spec(
        block_size=16,
        mask_token_id=0,
        target_layer_ids=[2, 0],
        num_target_layers=None,
        dflash_config={"mask_token_id": None, "target_layer_ids": None, "num_target_layers": 36},
    )
    assert (top.block_size, top.mask_token_id, top.target_layer_ids) == (16, 0, (2, 0))
    assert top.num_target_layers == 36


def test_unsorted_target_layer_ids_keep_the_order_of_the_checkpoint() -> None:
    assert spec(dflash_config={"target_layer_ids": [4, 0, 2]}).target_layer_ids == (4, 0, 2)


# Of a launch -> (tokens of a block, rows of the draft's forward for it).
BLOCKS = [
    ({}, Flags(4), (8, 8)),  # the config wins
    ({"block_size": None}, Flags(16), (16, 16)),
    ({"sample_from_anchor": True}, Flags(4), (9, 8)),
    ({"sample_from_anchor": True, "block_size": None}, Flags(16), (16, 15)),
]


@pytest.mark.parametrize(("fields", "flags", "expected"), BLOCKS, ids=str)
def test_a_flag_gives_the_tokens_of_a_block_where_the_config_has_no_rows(
    fields: dict, flags: Flags, expected: tuple
) -> None:
    read = DraftSpec.from_config(draft_config(**fields), flags)
    assert (read.block_size, read.draft_rows(read.block_size)) == expected


def test_a_flag_gives_the_window_of_sliding_layers_where_the_config_has_none() -> None:
    for window, expected in ((16, 16), (None, 33)):
        read = DraftSpec.from_config(draft_config(sliding_window=window), Flags(window=33))
        assert [layer.window for layer in read.layers] == [expected, None]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--speculative-dflash-block-size 16 --tp-size 2", Flags(16)),
        ("--speculative-num-draft-tokens=8 --speculative-draft-window-size=512", Flags(8, 512)),
        ("--speculative-num-draft-tokens 8 --speculative-dflash-block-size", Flags(8)),
        ("--speculative-dflash-block-size many", Flags()),
    ],
)
def test_flags_are_read_off_a_command_line(words: str, expected: Flags) -> None:
    assert Flags.of_words(words.split()) == expected


def test_fields_that_are_left_out_are_told_all_at_once_and_a_flag_before_the_file() -> None:
    old = {name: None for name in ("hidden_size", "block_size", "sliding_window", "num_attention_heads")}
    with pytest.raises(DraftConfigError) as raised:
        spec(dflash_config={"target_layer_ids": None, "mask_token_id": None}, **old)
    fields = ["hidden_size", "num_attention_heads", "block_size", "target_layer_ids", "mask_token_id"]
    assert [one.field for one in raised.value.all] == [*fields, "sliding_window"]
    fixes = {one.field: one.fix for one in raised.value.all}
    assert fixes["block_size"].startswith("Set --speculative-dflash-block-size to the tokens of a block, or add ")
    assert fixes["sliding_window"].startswith("Set --speculative-draft-window-size to the window ")
    assert fixes["target_layer_ids"].startswith("Add dflash_config.target_layer_ids ")
    assert all(str(one).splitlines()[0] in str(raised.value) for one in raised.value.all[1:])
    config = speculators_config(draft_config(), block_size=None, aux_hidden_state_layer_ids=None)
    with pytest.raises(DraftConfigError) as raised:
        DraftSpec.from_config(config)
    assert [one.field for one in raised.value.all] == ["block_size", "aux_hidden_state_layer_ids"]
    with pytest.raises(DraftConfigError) as raised:
        spec(num_hidden_layers=None, dflash_config={"projector_type": "domino", "shift_label": False})
    fields = ["num_hidden_layers", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"]
    assert [one.field for one in raised.value.all] == fields


# ---- Whose row proposes ------------------------------------------------------------------------------------

ANCHOR = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
FAMILIES = {
    "plain": draft_config,
    "DFlash2": dflash2_config,
    "Laguna": lambda **fields: draft_config(architectures=["DFlashLagunaForCausalLM"], **fields),
    "DSpark": lambda **fields: dspark_config(**{"block_size": 8, **fields}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ANCHOR)
def test_the_anchors_row_proposes_by_either_name_in_every_place(family: str, name: str) -> None:
    make = FAMILIES[family]
    unsaid = make()
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


def test_the_anchors_row_proposes_in_the_speculators_format_too() -> None:
    config = speculators_config(draft_config())
    for fields in ({"sample_from_anchor": True}, {"dflash_config": {"query_zero_predicts_next": True}}):
        read = DraftSpec.from_config({**config, "sample_from_anchor": None, **fields})
        assert (read.anchor_proposes, read.block_size, read.draft_rows(9)) == (True, 9, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sample_from_anchor": True, "query_zero_predicts_next": False},
            "query_zero_predicts_next=False: expected sample_from_anchor=True to say the same",
        ),
        (
            {"sample_from_anchor": False, "dflash_config": {"sample_from_anchor": True}},
            "dflash_config.sample_from_anchor=True: expected sample_from_anchor=False to say the same",
        ),
        (
            {"eagle_config": {"query_zero_predicts_next": True}, "dflash_config": {"sample_from_anchor": False}},
            "eagle_config.query_zero_predicts_next=True: expected dflash_config.sample_from_anchor=False to say",
        ),
        (
            {"sample_from_anchor": False, "dflash_config": dict(OF_DOMINO)},
            "dflash_config.shift_label=True: expected sample_from_anchor=False to say the same",
        ),
        ({"sample_from_anchor": "false"}, "sample_from_anchor='false': expected true or false"),
        ({"dflash_config": {"sample_from_anchor": 1}}, "dflash_config.sample_from_anchor=1: expected true or"),
        ({"query_zero_predicts_next": [True]}, r"query_zero_predicts_next=\[True\]: expected true or false"),
        (
            {"sample_from_anchor": True, "query_zero_predicts_next": "true"},
            "query_zero_predicts_next='true': expected true or false",
        ),
    ],
    ids=str,
)
def test_whose_row_proposes_is_said_once_and_by_true_or_false(fields: dict, message: str) -> None:
    with pytest.raises(DraftConfigError, match=f"draft config {message}"):
        spec(**fields)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5e6}, RopeSpec(5e6, None, 16, True)),
        ({"rope_theta": 1, "rope_parameters": {"rope_theta": 7.0}}, RopeSpec(7.0, None, 16, True)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, RopeSpec(2e4, None, 16, True)),
        ({"rope_scaling": YARN}, RopeSpec(1e4, YARN, 16, True)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeSpec(1e4, {"rope_type": "linear", "factor": 2}, 16, True),
        ),
        ({"rope_parameters": {**YARN, "rope_theta": 3.0}}, RopeSpec(3.0, YARN, 16, True)),
        ({"rope_parameters": {**YARN, "rope_theta": 3.0}, "rope_scaling": YARN}, RopeSpec(3.0, YARN, 16, True)),
        ({"partial_rotary_factor": 0.5}, RopeSpec(1e4, None, 8, True)),
        # Inside it was copied from the target: the trainers' Qwen3 rotates the whole head.
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, RopeSpec(1e4, None, 16, True)),
        ({"rope_scaling": {"partial_rotary_factor": 0.25, "type": "default"}}, RopeSpec(1e4, None, 16, True)),
        ({"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}}, RopeSpec(1e4, YARN, 16, True)),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
            RopeSpec(1e4, None, 8, True),
        ),
        ({"rope_parameters": YARN, "partial_rotary_factor": 0.5}, RopeSpec(1e4, YARN, 8, True)),
        ({"rope_scaling": {"rope_dim": 12, "partial_rotary_factor": 0.25}}, RopeSpec(1e4, None, 12, True)),
        ({"rope_dim": 4}, RopeSpec(1e4, None, 4, True)),
        ({"is_neox_style": False}, RopeSpec(1e4, None, 16, False)),
        ({"rope_is_neox_style": False, "is_neox_style": True}, RopeSpec(1e4, None, 16, False)),
    ],
    ids=str,
)
def test_rope_is_read_from_every_spelling(fields: dict, expected: RopeSpec) -> None:
    assert spec(**fields).rope == expected


@pytest.mark.parametrize("kind", ["mrope", "default"])
def test_the_m_rope_of_a_multimodal_target_becomes_plain_rope_over_the_whole_head(kind: str) -> None:
    copied = {
        "rope_type": kind,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }
    assert spec(rope_parameters={**copied, "rope_theta": 1e7}).rope == RopeSpec(1e7, None, 16, True)
    assert spec(rope_scaling={**copied, "rope_dim": 4}).rope.rotary_dim == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"transformer_layer_config": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}},
        {"transformer_layer_config": {"partial_rotary_factor": 0.25}},
        {"partial_rotary_factor": 0.25},
    ],
    ids=str,
)
def test_a_speculators_draft_rotates_the_whole_head_wherever_a_factor_stands(fields: dict) -> None:
    config = speculators_config(draft_config())
    decoder = {**config["transformer_layer_config"], **fields.get("transformer_layer_config", {})}
    assert DraftSpec.from_config({**config, **fields, "transformer_layer_config": decoder}).rope.rotary_dim == 16


# Fields of a config -> what it means, where transformers' class fills in what they leave out.
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
MODEL_TYPES = [
    ({"model_type": "gpt_oss", "rope_theta": None}, (150000.0, GPT_OSS_YARN)),
    ({"model_type": "gpt_oss", "rope_theta": 7.0}, (7.0, GPT_OSS_YARN)),
    ({"model_type": "gpt_oss", "rope_theta": None, "rope_scaling": YARN}, (150000.0, YARN)),
    ({"model_type": "gpt_oss", "rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, (7.0, None)),
    ({"model_type": "minimax_m2", "rope_theta": None}, (5e6, None)),
    ({"model_type": "glm4_moe", "rope_theta": None}, (1e4, None)),  # its class has a partial factor, inside
    ({"model_type": "llama", "rope_theta": None}, (1e4, None)),
    ({"model_type": None, "rope_theta": None}, (1e4, None)),
]


@pytest.mark.parametrize(("fields", "expected"), MODEL_TYPES, ids=str)
def test_a_rope_that_is_left_out_is_the_one_of_the_models_class(fields: dict, expected: tuple) -> None:
    rope = spec(**fields).rope
    assert (rope.theta, rope.scaling) == expected
    assert rope.rotary_dim == 16
    model_type = fields["model_type"]
    if model_type is not None:
        given = {key: value for key, value in fields.items() if value is not None and key != "model_type"}
        params = AutoConfig.for_model(model_type, **given).rope_parameters
        assert (rope.theta, (rope.scaling or {}).get("factor")) == (params["rope_theta"], params.get("factor"))


def test_a_norm_of_no_epsilon_has_the_one_of_the_models_class() -> None:
    assert spec(model_type="gpt_oss", rms_norm_eps=None, rope_parameters=YARN).rms_norm_eps == 1e-5
    assert spec(model_type="gpt_oss", rms_norm_eps=1e-6, rope_parameters=YARN).rms_norm_eps == 1e-6


def test_layers_that_are_left_out_are_full_whatever_the_models_class_fills_in() -> None:
    layers = spec(model_type="gpt_oss", rope_parameters=YARN, layer_types=None, sliding_window=128).layers
    assert layers == (LayerAttention("full_attention", False, None),) * 2


def test_shape_fields_have_the_defaults_of_the_published_format() -> None:
    draft = spec(num_key_value_heads=None, rms_norm_eps=None)
    assert (draft.num_kv_heads, draft.rms_norm_eps) == (4, 1e-6)
    nested = dict(draft_config(), text_config={"hidden_size": 96, "head_dim": 24})
    assert (DraftSpec.from_config(nested).hidden_size, DraftSpec.from_config(nested).head_dim) == (96, 24)


def test_value_scale_and_quantisation_are_read() -> None:
    scaled = spec(dflash_config={"attention_value_scale": 0.612}, quantization_config={"quant_method": "fp8"})
    assert (scaled.attention_value_scale, scaled.quantization) == (0.612, "fp8")
    assert (spec().attention_value_scale, spec().quantization) == (None, None)
    modelopt = spec(quantization_config={"quant_algo": "W4A16_NVFP4"})
    assert modelopt.quantization == "W4A16_NVFP4"


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        ({"block_size": None}, "block_size", None),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id", None),
        ({"dflash_config": {"target_layer_ids": None}}, "target_layer_ids", None),
        ({"dflash_config": {"block_size": "8"}}, "dflash_config.block_size", "8"),
        ({"block_size": 8.0}, "block_size", 8.0),
        ({"dflash_config": {"mask_token_id": -1}}, "dflash_config.mask_token_id", -1),
        ({"dflash_config": {"mask_token_id": True}}, "dflash_config.mask_token_id", True),
        ({"dflash_config": {"target_layer_ids": []}}, "dflash_config.target_layer_ids", []),
        ({"dflash_config": {"target_layer_ids": [1, "3"]}}, "dflash_config.target_layer_ids", [1, "3"]),
        ({"layer_types": ["full_attention"]}, "layer_types", ["full_attention"]),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types[1]", "linear"),
        ({"sliding_window": None}, "sliding_window", None),
        ({"sliding_window": 0}, "sliding_window", 0),
        ({"use_sliding_window": False}, "use_sliding_window", False),
        ({"is_causal": "no"}, "is_causal", "no"),
        ({"dflash_config": {"causal": 1}}, "dflash_config.causal", 1),
        ({"hidden_size": None}, "hidden_size", None),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"rope_scaling": {"rope_type": "fope"}}, "rope_scaling.rope_type", "fope"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters", None),
        ({"rope_parameters": {"rope_theta": 3.0}, "rope_scaling": YARN}, "rope_scaling", YARN),
        ({"rope_dim": 18}, "rope_dim", 18),
        ({"model_type": "of_next_year", "rope_theta": None}, "rope_parameters", None),
        ({"model_type": "of_next_year", "rms_norm_eps": None}, "rms_norm_eps", None),
        ({"model_type": "encoder-decoder", "rope_theta": None}, "model_type", "encoder-decoder"),
        (
            {"model_type": "laguna", "rope_theta": None},
            "rope_parameters",
            None,
        ),  # its class has a rope for each layer type
        ({"quantization_config": {}, "compression_config": {"bits": 4}}, "quantization_config", {"bits": 4}),
        ({"dflash_config": {"attention_value_scale": -1}}, "dflash_config.attention_value_scale", -1),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_served_is_named_with_its_value_and_what_to_change(
    overrides: dict, field: str, value: object
) -> None:
    with pytest.raises(DraftConfigError) as raised:
        spec(**overrides)
    assert raised.value.field == field
    if field != "rope_parameters":
        assert raised.value.value == value
    assert raised.value.expected in str(raised.value) and raised.value.fix in str(raised.value)


WIDTHS = ("4", '"block"', '"auto"', '{"trees": [16]}')


def test_the_plugin_config_is_read_inline_and_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps({"context_kv": "per_layer"}))
    assert PluginConfig.from_env({}) == PluginConfig(context_kv="auto")
    assert PluginConfig.from_env({"DFLASH_SGLANG_CONFIG": ' {"context_kv": "stacked"} '}).context_kv == "stacked"
    assert PluginConfig.from_env({"DFLASH_SGLANG_CONFIG": str(path)}).context_kv == "per_layer"
    widths = [PluginConfig.from_env({"DFLASH_SGLANG_CONFIG": f'{{"width": {value}}}'}).width for value in WIDTHS]
    assert widths == [
        WidthConfig(fixed=4),
        WidthConfig(fixed="block"),
        WidthConfig(),
        WidthConfig(trees=(16,)),
    ]
    assert PluginConfig().width == WidthConfig()
    heads = [PluginConfig.from_mapping(settings).draft_head for settings in ({}, {"draft_head": "as_is"})]
    assert heads == ["auto", "as_is"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"context_kvs": "auto"}', "unknown key 'context_kvs'. Known keys: context_kv"),
        ('{"context_kv": "fast"}', "context_kv='fast'.*expected one of auto, stacked, per_layer"),
        ('{"draft_head": "int8"}', "draft_head='int8'.*expected one of auto, as_is, fp8"),
        ('{"context_kv": 1}', r"context_kv=1 \(int\)"),
        ('{"context_kv": ["auto"]}', r"context_kv=\['auto'\] \(list\)"),
        ('{"width": 0}', r"DFLASH_SGLANG_CONFIG: width: fixed=0 \(int\): expected a whole number from 1 to"),
        ('{"width": "wide"}', r"width: fixed='wide' \(str\): expected .*'block' for that, or 'tree N'"),
        ('{"width": {"ragged": true}}', "width: unknown key 'ragged'. Known keys: widths, fixed"),
        ('{"width": {"trees": [1]}}', r"width: trees=1 \(int\): expected whole numbers from 2 to 64"),
        ('{"width": {"reserve": 1}}', "width: unknown key 'reserve'. Known keys: widths, fixed"),
        ("{", "is not JSON"),
        ("/nowhere/plugin.json", "neither inline JSON.*nor a readable file"),
    ],
)
def test_a_plugin_config_outside_the_schema_is_an_error_that_names_the_key(source: str, message: str) -> None:
    with pytest.raises(PluginConfigError, match=message):
        PluginConfig.from_env({"DFLASH_SGLANG_CONFIG": source})
