"""Drafts whose layers differ from Qwen3's: the served model against plain PyTorch and against SGLang's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import foreign
from tests.support import sglang_layers as layers
from tests.support.int8_quant import dequantised, int8_config, quantised
from tests.support.reference_dflash2 import dflash2_config, dflash2_tensors
from tests.support.reference_dspark import dspark_config, dspark_tensors
from tests.support.reference_layers import LAGUNA, SWIGLU, is_norm, layer_tensors, reference_draft
from tests.support.tiny import draft_config
from tests.unit.models.test_dflash2 import Target, assert_steps_equal

pytestmark = layers.cpu_only

GEMMA = dict(use_gemma_norm=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma norms": GEMMA,
    "swigluoai": SWIGLU,
    "Gemma norms and swigluoai": {**GEMMA, **SWIGLU, "attention_bias": True},
    "Laguna": LAGUNA,
    "Laguna, a gate per channel": {**LAGUNA, "gating": "per-element"},
    "Laguna without gates": {**LAGUNA, "gating": "disabled"},
}


def families() -> list[Any]:
    def works(draft: str) -> Any:
        return pytest.mark.matrix(target="Qwen3", draft=draft, kv="model dtype", outcome="works")

    return [pytest.param(fields, id=name, marks=works(name)) for name, fields in FAMILIES.items()]


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


@pytest.mark.parametrize("fields", families())
@pytest.mark.parametrize("block", [5, 8, 16])
def test_rows_and_proposals_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, fields, block
):
    config = draft_config(block_size=block, **fields)
    assert foreign(config) is None
    tensors = layer_tensors(config)
    assert_steps_equal(layers.load_draft(tmp_path, config, tensors), reference_draft(config, tensors), block)


@pytest.mark.parametrize("fields", families())
def test_rows_equal_those_of_sglangs_own_model(tmp_path, fields):
    """An independent witness: the built-in model on the same checkpoint, not compiled."""
    from sglang.srt.models import dflash
    from transformers import PretrainedConfig

    from dflash_sglang.models.context_kv.projection import ContextKV

    config = draft_config(layer_types=["sliding_attention"] * 2, **fields)
    tensors = layer_tensors(config)
    model = layers.load_draft(tmp_path, config, tensors)
    built_in_class = getattr(dflash, config["architectures"][0])
    with torch.compiler.set_stance("force_eager"):
        with layers.defaults(torch.float32):
            built_in = built_in_class(PretrainedConfig.from_dict(config))
            built_in.load_weights(tensors.items())
        embeds = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
        slots = torch.arange(1, 1 + 2 * 40).view(2, 40)
        positions = torch.cat([torch.arange(20, 28), torch.arange(3, 11)])
        hidden = []
        for one in (model, built_in):
            pool = layers.make_pool(model)
            attention = layers.PlainAttention(pool, [(slots[0], 20), (slots[1], 3)], 8)
            hidden.append(layers.run_draft(one, embeds.clone(), positions, attention))
        torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)

        features = torch.randn(9, model.fc.input_size, generator=torch.Generator().manual_seed(4))
        context, positions = ContextKV(model), torch.arange(9)
        rows, theirs = context.project(features), built_in.project_target_hidden(features)
        torch.testing.assert_close(rows, theirs, rtol=1e-4, atol=1e-4)
        for layer, (keys, values) in zip(built_in.layers, context.keys_values(rows, positions), strict=True):
            attention = layer.self_attn
            k, v = attention.kv_proj_only(built_in.prepare_context_hidden_for_kv(layer, theirs))
            k = attention.apply_k_rope(positions, attention.apply_k_norm(k))
            torch.testing.assert_close(keys, k, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, v, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["DFlash2DraftModel", "MiniMaxDFlash2DraftModel", "Qwen3DSparkModel"])
def test_gemma_norms_of_other_families_are_plain_norms_of_one_more(tmp_path, architecture):
    if architecture == "Qwen3DSparkModel":
        config, tensors = dspark_config(), dspark_tensors(dspark_config())
    else:
        config = dflash2_config(architectures=[architecture])
        tensors = dflash2_tensors(config)
    of_gemma = {name: tensor - 1 if is_norm(name) else tensor for name, tensor in tensors.items()}
    assert foreign({**config, **GEMMA}) is None
    embeds = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    hidden = []
    for fields, held in (({}, tensors), (GEMMA, of_gemma)):
        model = layers.load_draft(tmp_path / str(len(hidden)), {**config, **fields}, held)
        attention = layers.PlainAttention(layers.make_pool(model), [(torch.arange(1, 41), 20)], 8)
        hidden.append(layers.run_draft(model, embeds.clone(), torch.arange(20, 28), attention))
    torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fields", families())
def test_an_idle_batch_runs_every_layer_and_writes_nothing(tmp_path, fields):
    config = draft_config(**fields)
    model = layers.load_draft(tmp_path, config, layer_tensors(config))
    model.bind_target(Target())
    layers.assert_idle_batch_writes_nothing(model)


def test_context_rows_are_normed_by_each_layer_in_both_forms_of_the_projection(tmp_path):
    config = draft_config(**LAGUNA)
    model = layers.load_draft(tmp_path, config, layer_tensors(config))
    layers.assert_context_kv(model, reference_draft(config, layer_tensors(config)))


@pytest.mark.parametrize("in_file", [True, False])
def test_quantised_layers_of_laguna_project_each_layers_normed_rows(tmp_path, in_file):
    """in_file: whether the checkpoint is quantised, or its loader quantises, which leaves gates as they are."""
    from dflash_sglang.models.context_kv.projection import ContextKV
    from dflash_sglang.startup.facts import LoadError

    config, held, rounded = draft_config(**LAGUNA), dict[str, Tensor](), dict[str, Tensor]()
    if in_file:
        config["quantization_config"] = {"quant_method": "int8"}
    for name, tensor in layer_tensors(config).items():
        linear = name == "fc.weight" or (name.endswith("_proj.weight") and (in_file or ".g_proj." not in name))
        held |= quantised({name: tensor}) if linear else {name: tensor}
        scale = name.removesuffix(".weight") + ".weight_scale"
        rounded[name] = dequantised(held[name], held[scale]) if linear else tensor
    model = layers.load_draft(tmp_path, config, held, int8_config())
    assert (model.layers[0].self_attn.g_proj.weight.dtype == torch.int8) is in_file
    with pytest.raises(LoadError, match="but each layer norms its context rows. Set context_kv to 'auto'"):
        ContextKV(model, "stacked")
    context = ContextKV(model)
    assert context.form == "per_layer"
    features = torch.randn(9, model.fc.input_size, generator=torch.Generator().manual_seed(4))
    expected = reference_draft(config, rounded).context_kv(features, torch.arange(9))
    found = context.keys_values(context.project(features), torch.arange(9))
    for pair, of_layer in zip(expected, found, strict=True):
        for one, other in zip(pair, of_layer, strict=True):
            torch.testing.assert_close(other, one.flatten(1), rtol=1e-4, atol=1e-4)


def test_a_gate_is_read_as_sglang_reads_it():
    from sglang.srt.configs.laguna import normalize_gating

    config = draft_config(**LAGUNA)
    gates = {"per-head": 1, "per-element": config["head_dim"], "disabled": 0}
    for gating in (True, False, None, *gates):
        spec = DraftSpec.from_config({**config, "gating": gating})
        assert spec.laguna is not None and spec.laguna.gates == gates[normalize_gating(gating)]
    del config["gating"]
    assert DraftSpec.from_config(config).laguna.gates == 1


def test_a_base_alone_is_plain_rope_as_sglangs_class_of_the_config_reads_it():
    from sglang.srt.configs.laguna import LagunaConfig
    from sglang.srt.utils.hf_transformers.common import get_rope_config

    config = {**draft_config(**LAGUNA), "model_type": "laguna", "rope_theta": 500000.0}
    rope = DraftSpec.from_config(config).rope
    assert (rope.theta, rope.scaling, rope.rotary_dim) == (500000.0, None, config["head_dim"])
    theirs = LagunaConfig(**{name: value for name, value in config.items() if name != "model_type"})
    assert get_rope_config(theirs) == (500000.0, None) and theirs.partial_rotary_factor == 1.0


@pytest.mark.parametrize("gating", ["per-layer", 1, ["per-head"]])
def test_a_gate_of_another_kind_is_refused_by_its_field(gating):
    config = {**draft_config(**LAGUNA), "gating": gating}
    with pytest.raises(DraftConfigError, match=re.escape(f"draft config gating={gating!r}: expected per-head")):
        DraftSpec.from_config(config)


@pytest.mark.parametrize("name", ["aux_hidden_norms.2.weight", "layers.1.self_attn.g_proj.weight"])
def test_a_missing_tensor_of_laguna_is_an_error_that_names_it_alone(tmp_path, name):
    config = draft_config(**LAGUNA)
    tensors = layer_tensors(config)
    del tensors[name]
    with pytest.raises(ValueError, match=rf"missing tensors \['{name}'\]"):
        layers.load_draft(tmp_path, config, tensors)


def test_a_gate_of_another_size_is_an_error_that_names_it(tmp_path):
    config = draft_config(**LAGUNA)
    tensors = layer_tensors({**config, "gating": "per-element"})
    with pytest.raises(ValueError, match=r"'layers.0.self_attn.g_proj.weight' of shape \(64, 64\)"):
        layers.load_draft(tmp_path, config, tensors)


@pytest.mark.parametrize("field", ["swiglu_alpha", "swiglu_limit"])
def test_the_clamped_activation_needs_both_numbers(field):
    with pytest.raises(DraftConfigError, match=f"draft config {field}=None: expected a positive number beside"):
        DraftSpec.from_config(draft_config(**{**SWIGLU, field: None}))


def test_a_norm_of_another_size_is_an_error_that_names_it(tmp_path):
    config = draft_config(**GEMMA)
    tensors = layer_tensors(config) | {"hidden_norm.weight": torch.zeros(32)}
    with pytest.raises(ValueError, match=r"'hidden_norm.weight' of shape \(32,\) .* expected shape \(64,\)"):
        layers.load_draft(tmp_path, config, tensors)


def test_kernels_that_scale_by_the_weight_itself_are_left_out_under_gemma_norms(tmp_path):
    for fields, why in ((GEMMA, "the draft's norms scale by 1 + weight"), (SWIGLU, None)):
        config = draft_config(**fields)
        model = layers.load_draft(tmp_path, config, layer_tensors(config))
        assert {layer.self_attn.no_table_kernel for layer in model.layers} == {why}
