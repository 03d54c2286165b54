"""Tensors of a dense draft that are missing, too many or of another shape are refused by the launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.checkpoint.own_modules import TRAINING_TENSORS
from dflash_sglang.startup.tensor_checks import presence_problems, shape_problems
from tests.support.reference_dflash2 import dflash2_config, dflash2_tensors
from tests.support.reference_domino import domino_config, domino_tensors
from tests.support.reference_dspark import dspark_config, dspark_tensors
from tests.support.reference_gemma4 import gemma4_config, gemma4_tensors
from tests.support.tiny import draft_config, draft_tensors


def gemma4_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Without embedding and head, which other checks look for."""
    held = gemma4_tensors(config)
    return {name: tensor for name, tensor in held.items() if not name.startswith(("embed_tokens.", "lm_head."))}


KINDS: dict[str, tuple[dict[str, Any], Callable[..., dict[str, Any]]]] = {
    "plain": (draft_config(), draft_tensors),
    "with biases": (draft_config(attention_bias=True), draft_tensors),
    "DFlash2": (dflash2_config(), dflash2_tensors),
    "DSpark, gated": (dspark_config(markov_head_type="gated"), dspark_tensors),
    "DSpark, rnn": (dspark_config(markov_head_type="rnn"), dspark_tensors),
    "DSpark of Gemma 4's layers": (gemma4_config(), gemma4_layers),
    "Domino": (domino_config(), domino_tensors),
}


def facts(config: dict[str, Any], make: Callable[..., dict[str, Any]]) -> dict[str, TensorFacts]:
    return {name: TensorFacts("F32", tuple(tensor.shape)) for name, tensor in make(config).items()}


def said(config: dict[str, Any], tensors: dict[str, TensorFacts]) -> list[str]:
    spec = DraftSpec.from_config(config)
    return [str(problem) for check in (presence_problems, shape_problems) for problem in check(spec, tensors)]


@pytest.mark.parametrize(("config", "make"), KINDS.values(), ids=KINDS)
def test_a_checkpoint_as_it_is_trained_is_complete_and_each_tensor_is_named_that_is_missing(
    config: dict[str, Any], make: Callable[..., dict[str, Any]]
) -> None:
    whole = facts(config, make)
    assert said(config, whole) == [] == said(config, {f"model.{name}": fact for name, fact in whole.items()})
    extra = {
        "layers.0.self_attn.rotary_emb.inv_freq": TensorFacts("F32", (8,)),
        "t2d": TensorFacts("BOOL", (320,)),
    }
    assert said(config, {**whole, **extra}) == []
    for name in whole.keys() - {*TRAINING_TENSORS}:
        [problem] = said(config, {other: fact for other, fact in whole.items() if other != name})
        assert problem.startswith(f"draft tensors=None: expected {name} in the checkpoint. ")


def test_stacked_projections_take_the_place_of_single_ones() -> None:
    config = draft_config(num_hidden_layers=1, layer_types=["full_attention"])
    whole = facts(config, draft_tensors)
    single = [n for n in whole if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    stacked = {n: f for n, f in whole.items() if n not in single}
    stacked["layers.0.self_attn.qkv_proj.weight"] = TensorFacts("F32", (128, 64))
    assert said(config, stacked) == []
    [problem] = said(config, {**stacked, single[0]: whole[single[0]]})
    assert problem.startswith(f"draft tensors='{single[0]}': expected only tensors of the draft that ")


def test_a_tensor_that_the_config_does_not_describe_is_named() -> None:
    others = "expected only tensors of the draft that "
    one_layer, whole = (
        draft_config(num_hidden_layers=1, layer_types=["full_attention"]),
        facts(draft_config(), draft_tensors),
    )
    values = "layers.1.self_attn.v_proj.weight"  # beside keys that are values, too
    for config, tensors, first, more in (
        (one_layer, whole, "draft tensors='layers.1.input_layernorm.weight, ", f"and 7 more': {others}"),
        (draft_config(), {**whole, "hidden_norm.weight": TensorFacts("F32", (63,))},
         "draft tensor hidden_norm.weight=[63]: expected [64], which config.json describes. ", ""),
        (gemma4_config(), {**facts(gemma4_config(), gemma4_layers), values: TensorFacts("F32", (32, 64))},
         f"draft tensors='{values}': {others}", ""),
    ):  # fmt: skip
        [problem] = said(config, tensors)
        assert problem.startswith(first) and more in problem


def test_a_quantised_checkpoint_is_its_loaders_to_judge() -> None:
    whole = facts(draft_config(), draft_tensors)
    del whole["norm.weight"]
    whole["layers.0.mlp.up_proj.weight"] = TensorFacts("F8_E4M3", (128, 64))
    assert said(draft_config(), whole) == []
    assert said(draft_config(), {}) == []
