"""The strict loader (C24): every tensor of a checkpoint has a place, every place gets its tensors."""

from __future__ import annotations

import pytest
import torch

from tests.support import sglang_layers as layers
from tests.support.int8_quant import dequantised, int8_config, quantised
from tests.support.tiny import draft_config, draft_tensors, write_checkpoint

pytestmark = layers.cpu_only


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


@pytest.fixture
def tensors():
    return draft_tensors(draft_config())


@pytest.fixture
def model(tmp_path, tensors):
    """Built, not loaded."""
    from dflash_sglang.models.draft import DFlashDraftModel

    write_checkpoint(tmp_path, draft_config(), tensors)
    with layers.defaults(torch.float32):
        return DFlashDraftModel(layers.hf_config(tmp_path))


def quantised_model(directory, ignored=()):
    from dflash_sglang.models.draft import DFlashDraftModel

    write_checkpoint(directory, draft_config(), {})
    with layers.defaults(torch.float32):
        return DFlashDraftModel(layers.hf_config(directory), int8_config(ignored))


def test_stacked_parameters_hold_their_parts_in_order_with_and_without_the_prefix(model, tensors):
    rotary = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    model.load_weights({f"model.{name}": tensor for name, tensor in {**tensors, **rotary}.items()}.items())
    layer = model.layers[1]
    parts = [tensors[f"layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(parts))
    parts = [tensors[f"layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))
    assert torch.equal(model.fc.weight, tensors["fc.weight"])


@pytest.mark.parametrize(
    "name",
    ["fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight",
     "layers.1.self_attn.q_norm.weight", "norm.weight"],
)  # fmt: skip
def test_a_missing_tensor_is_an_error_that_names_it_alone(model, tensors, name):
    del tensors[name]
    with pytest.raises(ValueError, match=rf"missing tensors \['{name}'\]"):
        model.load_weights(tensors.items())


@pytest.mark.parametrize(
    "name",
    ["lm_head.weight", "layers.2.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.bias", "fc.bias"],
)
def test_an_unexpected_tensor_is_an_error_that_names_it_alone(model, tensors, name):
    tensors[name] = torch.zeros(64)
    with pytest.raises(ValueError, match=rf"unexpected tensors \['{name}'\].*convert a checkpoint of others"):
        model.load_weights(tensors.items())


def test_a_tensor_of_the_wrong_shape_is_an_error_that_names_it_and_both_shapes(model, tensors):
    tensors["fc.weight"] = torch.zeros(64, 128)
    with pytest.raises(ValueError, match=r"'fc.weight' of shape \(64, 128\) and .*expected shape \(64, 192\)"):
        model.load_weights(tensors.items())


LARGER = {
    "layers.0.self_attn.q_proj.weight": ((80, 64), (64, 64)),
    "layers.1.self_attn.k_proj.weight": ((48, 64), (32, 64)),
    "layers.1.self_attn.v_proj.weight": ((48, 64), (32, 64)),
    "layers.0.self_attn.o_proj.weight": ((64, 80), (64, 64)),
    "layers.0.mlp.gate_proj.weight": ((144, 64), (128, 64)),
    "layers.0.mlp.up_proj.weight": ((144, 64), (128, 64)),
    "layers.1.mlp.down_proj.weight": ((64, 144), (64, 128)),
}


@pytest.mark.parametrize("name", LARGER)
def test_a_tensor_that_is_larger_than_the_config_says_is_refused_and_not_cut(model, tensors, name):
    """SGLang's loaders of sharded layers take the rank's part of it; the prefix makes no difference."""
    found, expected = LARGER[name]
    tensors = {f"model.{key}": tensor for key, tensor in tensors.items()} | {f"model.{name}": torch.zeros(found)}
    message = rf"'model.{name}' of shape {found} and torch.float32: expected shape {expected}, which config.json"
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        model.load_weights(tensors.items())


def test_a_weight_update_may_bring_a_part(model, tensors):
    model.load_weights(tensors.items())
    model.load_weights([("norm.weight", torch.full((64,), 3.0))])
    assert bool((model.norm.weight == 3).all())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("head.weight", (3, 64)), r"unexpected tensors \['head.weight'\].*selector='target'.*keeps its weights"),
        (("layers.1.mlp.down_proj.weight", (64, 144)), r"expected shape \(64, 128\)"),
        (("layers.1.mlp.down_proj.weight", (64, 96)), r"expected shape \(64, 128\)"),
        (("layers.1.self_attn.k_norm.weight", (17,)), r"expected shape \(16,\)"),
        (("fc.weight", (64, 128)), r"expected shape \(64, 192\)"),
    ],
    ids=str,
)
def test_a_refused_weight_update_leaves_the_draft_as_it_was(model, tensors, wrong, says):
    model.load_weights(tensors.items())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    update = {name: tensor + 1 for name, tensor in tensors.items() if name != wrong[0]}
    update[wrong[0]] = torch.ones(wrong[1])  # the last one
    with pytest.raises(ValueError, match=says):
        model.load_weights(update.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_the_tensors_of_a_whole_target_are_not_all_listed(model, tensors):
    model.load_weights(tensors.items())
    unknown = {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(64, 64) for i in range(2, 36)}
    with pytest.raises(ValueError, match=r"tensors \['model.layers.10.+'\] and 26 more\. Expected only"):
        model.load_weights(unknown.items())


def test_a_quantised_fc_keeps_its_scales(tmp_path, tensors):
    checkpoint = quantised(tensors)
    model = quantised_model(tmp_path)
    model.load_weights(checkpoint.items())
    assert model.fc.weight.dtype == torch.int8
    assert torch.equal(model.fc.weight_scale, checkpoint["fc.weight_scale"])
    features = torch.randn(4, 192)
    wanted = features @ dequantised(checkpoint["fc.weight"], checkpoint["fc.weight_scale"]).T
    torch.testing.assert_close(model.fc(features)[0], wanted)


def test_a_missing_scale_of_a_quantised_module_is_named_by_its_checkpoint_name(tmp_path, tensors):
    checkpoint = quantised(tensors)
    del checkpoint["fc.weight_scale"], checkpoint["layers.0.self_attn.v_proj.weight_scale"]
    with pytest.raises(
        ValueError, match=r"missing tensors \['fc.weight_scale', 'layers.0.self_attn.v_proj.weight_scale'\]"
    ):
        quantised_model(tmp_path).load_weights(checkpoint.items())


def test_modules_on_the_ignore_list_stay_dense_in_a_quantised_draft(tmp_path, tensors):
    ignored = ("fc", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.1.self_attn.o_proj")
    model = quantised_model(tmp_path, ignored)
    model.load_weights(quantised(tensors, ignored).items())
    assert torch.equal(model.fc.weight, tensors["fc.weight"])
    dense = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert {"layers.0.mlp.gate_up_proj.weight", "layers.1.self_attn.o_proj.weight"} <= dense
    assert model.layers[1].mlp.gate_up_proj.weight.dtype == torch.int8
