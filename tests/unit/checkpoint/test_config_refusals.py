"""Fields of a draft's config.json that cannot be served: each is named with its value and what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from tests.support.draft_formats import speculators_config, speculators_dflash2
from tests.support.reference_dflash2 import dflash2_config
from tests.support.reference_domino import OF_DOMINO
from tests.support.start_up import refused, tells
from tests.support.tiny import draft_config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
PRESENT = "the field to be present"
FREQUENCIES = "one of default, linear, yarn, llama3, proportional, whose frequencies stay as a sequence grows"


def plain(**fields: Any) -> dict[str, Any]:
    return draft_config(**fields)


def in_dflash(**nested: Any) -> dict[str, Any]:
    return draft_config(dflash_config=nested)


def dflash2(**nested: Any) -> dict[str, Any]:
    return dflash2_config(dflash_config=nested)


def exported(decoder: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    config = speculators_config(draft_config(), **fields)
    return {**config, "transformer_layer_config": {**config["transformer_layer_config"], **(decoder or {})}}


def exported_dflash2(**fields: Any) -> dict[str, Any]:
    return speculators_dflash2(dflash2_config(), **fields)


# a config's kind, its fields -> "field=value: expected ... . fix" after "draft config "
ROWS: list[tuple[Callable[..., dict[str, Any]], dict[str, Any], str]] = [
    # the block, the mask, the target's layers
    (plain, {"block_size": None}, "block_size=None: expected the trained block length. Set "
     "--speculative-dflash-block-size to the tokens of a block, or add dflash_config.block_size to"),
    (plain, {"block_size": 8.0}, "block_size=8.0: expected an integer >= 1. Correct block_size in"),
    (in_dflash, {"mask_token_id": None}, "mask_token_id=None: expected the id that stands for a position to be "
     "proposed. Add dflash_config.mask_token_id (the one it was trained with)"),
    (in_dflash, {"mask_token_id": True}, "dflash_config.mask_token_id=True: expected an integer >= 0"),
    (in_dflash, {"target_layer_ids": None}, "target_layer_ids=None: expected the layers of the target that the "
     "draft was trained on, in the order of fc's columns. Add dflash_config.target_layer_ids (its model card"),
    (in_dflash, {"target_layer_ids": []}, "dflash_config.target_layer_ids=[]: expected a non-empty list of"),
    (exported, {"mask_token_id": None}, "mask_token_id=None: expected the id ... Add mask_token_id (the one"),
    (exported, {"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids=None: expected the layers of "
     "the target ... Add aux_hidden_state_layer_ids (its model card"),
    (exported, {"aux_hidden_state_layer_ids": [0, 3, 4]}, "aux_hidden_state_layer_ids=[0, 3, 4]: expected a "
     "non-empty list of integers >= 1, each once (1 is the output of the target's first layer). Write the layers"),
    (exported, {"target_hidden_size": 128}, "target_hidden_size=128: expected null or the draft's hidden_size of "
     "64. Serve a draft whose features are as wide as its layers."),
    # layers
    (plain, {"layer_types": ["full_attention"]}, "layer_types=['full_attention']: expected a list of 2 layer "
     "types, one per draft layer (num_hidden_layers=2). Make layer_types and num_hidden_layers agree in"),
    (plain, {"layer_types": ["full_attention", "linear"]}, "layer_types[1]='linear': expected full_attention or "
     "sliding_attention. This worker has no other draft layer; serve a checkpoint of these layer types."),
    (plain, {"sliding_window": None}, "sliding_window=None: expected the window of the sliding_attention layers, "
     "in tokens. Set --speculative-draft-window-size to the window that the draft was trained with, or add"),
    (plain, {"use_sliding_window": False}, "use_sliding_window=False: expected true beside sliding_attention "
     "layers: transformers gives them no window otherwise. Set it to true if the draft was trained with its"),
    (plain, {"is_causal": "no"}, "is_causal='no': expected true or false"),
    (plain, {"hidden_size": None}, f"hidden_size=None: expected {PRESENT}. Add hidden_size to the draft's"),
    (plain, {"hidden_act": "gelu"}, "hidden_act='gelu': expected silu or swigluoai. The draft's MLP is a SwiGLU;"),
    (plain, {"hidden_act": "swigluoai"}, "swiglu_alpha=None: expected a positive number beside "
     "hidden_act='swigluoai'. Add swiglu_alpha (the one that the draft was trained with)"),
    (plain, {"eagle_config": 5}, "eagle_config=5: expected an object. Correct eagle_config in the draft's"),
    # the rotary embedding
    (plain, {"rope_scaling": {"rope_type": "fope"}}, f"rope_scaling.rope_type='fope': expected {FREQUENCIES}."),
    (plain, {"rope_scaling": {"rope_type": "proportional", "rope_dim": 8, "factor": 2.0}},
     "rope_scaling.factor=2.0: expected none beside rope_type='proportional'"),
    (plain, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters={'full_attention': "
     "... expected one object with the rope parameters of every draft layer. Write one flat rope_parameters"),
    (plain, {"rope_parameters": {"rope_theta": 3.0}, "rope_scaling": YARN},
     "rope_scaling={'factor': 4.0 ... expected none beside rope_parameters={'rope_theta': 3.0}, or the same "
     "scaling. Leave the one that"),
    (plain, {"rope_dim": 18}, "rope_dim=18: expected an even rotary width of at most head_dim=16"),
    (plain, {"model_type": "of_next_year", "rope_theta": None}, "rope_parameters=None: expected its value, which "
     "transformers does not fill in for model_type='of_next_year'. Add rope_parameters (the one that"),
    (plain, {"model_type": "encoder-decoder", "rope_theta": None}, "model_type='encoder-decoder': expected the "
     "type of a language model ( ... Correct it in config.json."),
    (plain, {"model_type": "laguna", "rope_theta": None}, "rope_parameters={"),
    # what scales, what is quantised, what the vocabulary is
    (plain, {"quantization_config": {}, "compression_config": {"bits": 4}},
     "quantization_config={'bits': 4}: expected an object with a quant_method. Add "
     "quantization_config.quant_method to"),
    (in_dflash, {"attention_value_scale": -1}, "dflash_config.attention_value_scale=-1: expected a positive"),
    (in_dflash, {"input_embedding_scale": float("inf")}, "dflash_config.input_embedding_scale=inf: expected a"),
    (plain, {"has_lm_head": "yes"}, "has_lm_head='yes': expected true or false."),
    # whose row proposes
    (plain, {"sample_from_anchor": True, "query_zero_predicts_next": False},
     "query_zero_predicts_next=False: expected sample_from_anchor=True to say the same: whether the row of the "
     "last committed token proposes, too. Keep the one"),
    (plain, {"sample_from_anchor": False, "dflash_config": {"sample_from_anchor": True}},
     "dflash_config.sample_from_anchor=True: expected sample_from_anchor=False to say the same"),
    (plain, {"eagle_config": {"query_zero_predicts_next": True}, "dflash_config": {"sample_from_anchor": False}},
     "eagle_config.query_zero_predicts_next=True: expected dflash_config.sample_from_anchor=False to say"),
    (plain, {"sample_from_anchor": False, "dflash_config": dict(OF_DOMINO)},
     "dflash_config.shift_label=True: expected sample_from_anchor=False to say the same"),
    (plain, {"sample_from_anchor": "false"}, "sample_from_anchor='false': expected true or false"),
    # DFlash2
    (dflash2, {"conv_group_size": None}, "dflash_config.conv_group_size=None: expected its value beside "
     "dflash_config.conv_kernel_size=2: a convolution has both. Add dflash_config.conv_group_size (the one it"),
    (dflash2, {"conv_kernel_size": 0}, "dflash_config.conv_kernel_size=0: expected its value beside "
     "dflash_config.conv_group_size=16"),
    (dflash2, {"conv_group_size": 24}, "dflash_config.conv_group_size=24: expected a divisor of hidden_size=64. "
     "Correct dflash_config.conv_group_size or hidden_size in the draft's config.json."),
    (dflash2, {"conv_kernel_size": 17}, "dflash_config.conv_kernel_size=17: expected at most 16 taps. Correct "
     "dflash_config.conv_kernel_size"),
    (dflash2, {"selector_top_k": None}, f"selector_top_k=None: expected {PRESENT} in a draft of this family. Add "
     f"dflash_config.selector_top_k (the one it was trained with)"),
    (dflash2, {"selector_top_k": 33}, "dflash_config.selector_top_k=33: expected at most 32 candidates per "
     "position. Correct selector_top_k in the draft's config.json, or serve a checkpoint trained with fewer."),
    (dflash2_config, {"vocab_size": 3}, "dflash_config.selector_top_k=5: expected at most 3 candidates"),
    (dflash2, {"draft_vocab_size": 9}, "dflash_config.draft_vocab_size=9: expected none, or vocab_size=320: the "
     "selector's codebooks hold every token. Correct dflash_config.draft_vocab_size in the draft's config.json,"),
    (exported_dflash2, {"selector_rank": 0}, "selector_rank=0: expected its value beside selector_top_k=5: the"),
]  # fmt: skip


@refused("a malformed field")
def test_a_field_that_cannot_be_served_is_named_with_its_value_and_what_to_change() -> None:
    failures = []
    for make, fields, says in ROWS:
        try:
            said = f"read as {DraftSpec.from_config(make(**fields))}"
        except DraftConfigError as error:
            said = str(error)
        if not tells(said, f"draft config {says}"):
            failures.append((says, said))
    assert failures == []


def test_fields_that_are_left_out_are_told_all_at_once_and_a_flag_before_the_file() -> None:
    def absent(config: dict[str, Any]) -> DraftConfigError:
        with pytest.raises(DraftConfigError) as raised:
            DraftSpec.from_config(config)
        assert all(str(one).splitlines()[0] in str(raised.value) for one in raised.value.all[1:])
        return raised.value

    shape = "hidden_size", "num_attention_heads"
    nothing = dict.fromkeys((*shape, "block_size", "sliding_window"))
    error = absent(plain(dflash_config={"target_layer_ids": None, "mask_token_id": None}, **nothing))
    fields = [*shape, "block_size", "target_layer_ids", "mask_token_id", "sliding_window"]
    assert [one.field for one in error.all] == fields
    error = absent(exported(block_size=None, aux_hidden_state_layer_ids=None))
    assert [one.field for one in error.all] == ["block_size", "aux_hidden_state_layer_ids"]
    error = absent(plain(num_hidden_layers=None, dflash_config={"projector_type": "domino", "shift_label": False}))
    fields = ["num_hidden_layers", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim"]
    assert [one.field for one in error.all] == fields
