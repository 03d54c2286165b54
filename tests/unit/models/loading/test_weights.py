"""The strict loader (C24): every tensor of a checkpoint has a place, every place gets its tensors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from dflash_sglang.models.draft import DFlashDraftModel
from tests.support import sglang_layers as layers
from tests.support.tiny import draft_config, draft_tensors, write_checkpoint

pytestmark = layers.cpu_only


@pytest.fixture
def tensors():
    return draft_tensors(draft_config())


@pytest.fixture
def model(tmp_path):
    return build(tmp_path)


def build(directory: Any) -> Any:
    """Built, not loaded."""
    write_checkpoint(directory, draft_config(), {})
    with layers.defaults(torch.float32):
        return DFlashDraftModel(layers.hf_config(directory))


def test_stacked_parameters_hold_their_parts_in_order_with_and_without_the_prefix(model, tensors):
    rotary = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    model.load_weights({f"model.{name}": tensor for name, tensor in {**tensors, **rotary}.items()}.items())
    layer = model.layers[1]
    parts = [tensors[f"layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat(parts))
    parts = [tensors[f"layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(parts))
    assert torch.equal(model.fc.weight, tensors["fc.weight"])
    model.load_weights([("norm.weight", torch.full((64,), 3.0))])  # an update may bring a part
    assert bool((model.norm.weight == 3).all())


OF_LAYER = "layers.{}.self_attn.{}_proj.weight"
LOST = ["fc.weight", "hidden_norm.weight", OF_LAYER.format(1, "k"), "layers.0.mlp.up_proj.weight",
        "layers.1.self_attn.q_norm.weight", "norm.weight"]  # fmt: skip
UNEXPECTED = ["lm_head.weight", OF_LAYER.format(2, "q"), "layers.0.self_attn.q_proj.bias", "fc.bias"]
# What a tensor is, and what the config says. SGLang's loaders of sharded layers would take a rank's part of it.
MISSHAPEN = {
    "fc.weight": ((64, 128), (64, 192)),
    OF_LAYER.format(0, "q"): ((80, 64), (64, 64)),
    OF_LAYER.format(1, "k"): ((48, 64), (32, 64)),
    OF_LAYER.format(1, "v"): ((48, 64), (32, 64)),
    OF_LAYER.format(0, "o"): ((64, 80), (64, 64)),
    "layers.0.mlp.gate_proj.weight": ((144, 64), (128, 64)),
    "layers.0.mlp.up_proj.weight": ((144, 64), (128, 64)),
    "layers.1.mlp.down_proj.weight": ((64, 144), (64, 128)),
}


def test_a_tensor_that_is_missing_unexpected_or_of_another_shape_is_an_error_that_names_it_alone(
    tmp_path, tensors
):
    """The prefix makes no difference to the last ones."""
    cases = [({name: None}, rf"missing tensors \['{name}'\]") for name in LOST]
    for name in UNEXPECTED:
        cases.append(
            ({name: torch.zeros(64)}, rf"unexpected tensors \['{name}'\].*convert a checkpoint of others")
        )
    for name, (found, expected) in MISSHAPEN.items():
        says = f"'model.{name}' of shape {found} and torch.float32: expected shape {expected}, which config.json"
        cases.append(({name: torch.zeros(found)}, re.escape(says)))
    for i, (changed, says) in enumerate(cases):
        prefix = "model." if says.startswith("'model") else ""
        held = {f"{prefix}{name}": tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        with pytest.raises(ValueError, match=says):
            build(tmp_path / str(i)).load_weights(held.items())


def test_a_refused_weight_update_leaves_the_draft_as_it_was(model, tensors):
    model.load_weights(tensors.items())
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for name, shape, says in (
        ("head.weight", (3, 64), r"unexpected tensors \['head.weight'\].*selector='target'.*keeps its weights"),
        ("layers.1.mlp.down_proj.weight", (64, 144), r"expected shape \(64, 128\)"),
        ("layers.1.mlp.down_proj.weight", (64, 96), r"expected shape \(64, 128\)"),
        ("layers.1.self_attn.k_norm.weight", (17,), r"expected shape \(16,\)"),
        ("fc.weight", (64, 128), r"expected shape \(64, 192\)"),
    ):
        update = {other: tensor + 1 for other, tensor in tensors.items() if other != name}
        update[name] = torch.ones(shape)  # the last one
        with pytest.raises(ValueError, match=says):
            model.load_weights(update.items())
        assert all(torch.equal(parameter, before[own]) for own, parameter in model.named_parameters()), name
    unknown = {f"model.layers.{i}.self_attn.q_proj.weight": torch.ones(64, 64) for i in range(2, 36)}
    with pytest.raises(ValueError, match=r"tensors \['model.layers.10.+'\] and 26 more\. Expected only"):
        model.load_weights(unknown.items())
