"""DSpark drafts of Gemma 4's layers: the served model against transformers' layers, its config and its loading."""

from __future__ import annotations

import re

import pytest
import torch

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import check_family, foreign
from tests.support import sglang_layers as layers
from tests.support.reference_gemma4 import ReferenceGemma4, gemma4_config, gemma4_tensors
from tests.support.reference_walks import assert_equals_the_reference
from tests.unit.models.test_dflash2 import Target

pytestmark = layers.cpu_only

works = pytest.mark.matrix(target="any", draft="DSpark of Gemma 4's layers", kv="model dtype", outcome="works")
KEYS = "layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


@works
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("block", [5, 8, 16])
def test_rows_proposals_and_q_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, block, heads
):
    more = dict(num_global_key_value_heads=heads, attention_bias=heads == 2, final_logit_softcapping=2.0)
    config = gemma4_config(block_size=block - 1, **more)
    tensors = gemma4_tensors(config)
    model = layers.load_draft(tmp_path, config, tensors)
    model.bind_target(Target(scale=8.0))
    assert (model.spec.block_size, model.spec.draft_rows(block)) == (block, block - 1)
    reference = ReferenceGemma4.from_weights(config, tensors)
    head = reference.model.logits
    assert_equals_the_reference(model, reference, head, block, proposing=lambda rows: rows)
    ids = torch.arange(9)
    torch.testing.assert_close(model.forward_embed(ids), reference.model.embed_tokens(ids))


@works
def test_context_kv_equals_the_references_in_both_forms_of_the_projection(tmp_path):
    config = gemma4_config()
    model = layers.load_draft(tmp_path, config, gemma4_tensors(config))
    layers.assert_context_kv(model, ReferenceGemma4.from_weights(config, gemma4_tensors(config)))


def test_an_idle_batch_runs_every_layer_and_writes_nothing(tmp_path):
    config = gemma4_config()
    model = layers.load_draft(tmp_path, config, gemma4_tensors(config))
    model.bind_target(Target())
    layers.assert_idle_batch_writes_nothing(model)


def test_kernels_that_leave_values_as_projected_are_left_out(tmp_path):
    config = gemma4_config()
    model = layers.load_draft(tmp_path, config, gemma4_tensors(config))
    assert {layer.self_attn.no_table_kernel for layer in model.layers} == {"the draft norms its values"}


def test_an_update_of_a_key_projection_is_one_of_the_values(tmp_path):
    config = gemma4_config()
    model = layers.load_draft(tmp_path, config, gemma4_tensors(config))
    new = torch.randn(32, 64, generator=torch.Generator().manual_seed(8))
    model.load_weights([(KEYS, new)])
    held = model.layers[1].self_attn.qkv_proj.weight[-64:]
    assert torch.equal(held, torch.cat((new, new)))


def test_heads_and_rope_are_those_of_full_attention():
    config = gemma4_config()
    check_family(config)
    assert foreign(config) is None
    spec = DraftSpec.from_config(config)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 1, 32)
    assert (spec.rope.theta, spec.rope.scaling, spec.rope.rotary_dim) == (1e4, {"rope_type": "proportional"}, 8)
    assert (spec.vocabulary.embedding_scale, spec.vocabulary.logit_softcap) == (8.0, 30.0)
    assert [(layer.causal, layer.window) for layer in spec.layers] == [(False, None)] * 2


ROPE = gemma4_config()["rope_parameters"]
TURNED = {**ROPE["full_attention"], "factor": 2.0}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attention_k_eq_v", False, "attention_k_eq_v=False: expected true: k_proj gives the values"),
        ("hidden_activation", "silu", "hidden_activation='silu': expected gelu_pytorch_tanh"),
        ("global_head_dim", None, "global_head_dim=None: expected an integer >= 2"),
        ("num_global_key_value_heads", None, "num_global_key_value_heads=None: expected an integer >= 1"),
        ("layer_types", ["full_attention", "sliding_attention"], "layer_types=.*: expected a list of full_attent"),
        ("layer_types", None, "layer_types=None: expected a list of full_attention"),
        ("rope_parameters", {"rope_theta": 1e4}, "rope_parameters=.*: expected an object with full_attention"),
        ("rope_parameters", {"full_attention": TURNED}, "rope_parameters.factor=2.0: expected none beside"),
        ("dflash_config", 3, "dflash_config=3: expected an object"),
        ("final_logit_softcapping", -1.0, "final_logit_softcapping=-1.0: expected a positive number"),
    ],
)
def test_layers_of_another_form_are_refused_by_their_field(field, value, message):
    with pytest.raises(DraftConfigError, match=f"draft config (dflash_config.)?{message}"):
        DraftSpec.from_config(gemma4_config(**{field: value}))


def test_a_value_projection_is_an_error_that_names_it(tmp_path):
    config, extra = gemma4_config(), KEYS.replace("k_proj", "v_proj")
    tensors = gemma4_tensors(config) | {extra: torch.zeros(32, 64)}
    with pytest.raises(ValueError, match=f"unexpected tensor {re.escape(repr(extra))}. Expected none of v_proj"):
        layers.load_draft(tmp_path, config, tensors)


@pytest.mark.parametrize("name", ["layer_scalar", "pre_feedforward_layernorm.weight", "self_attn.k_norm.weight"])
def test_a_missing_tensor_is_an_error_that_names_it_alone(tmp_path, name):
    config = gemma4_config()
    tensors = gemma4_tensors(config)
    del tensors[f"layers.1.{name}"]
    with pytest.raises(ValueError, match=rf"missing tensors \['layers.1.{name}'\]"):
        layers.load_draft(tmp_path, config, tensors)
