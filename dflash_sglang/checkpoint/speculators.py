"""The speculators format: the decoder nested in a config.json of its own, spelt the way z-lab spells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_sglang.checkpoint.fields import DraftConfigError

DECODER = "transformer_layer_config"
LAYER_IDS = "aux_hidden_state_layer_ids"
ALGORITHM = "speculators_model_type"
DFLASH, DFLASH2, DSPARK = "dflash", "dflash2", "dspark"  # values of ALGORITHM

_DTYPE = ("dtype", "torch_dtype")
# All that the package's model classes read of the decoder; other fields change nothing there.
_OF_THE_DECODER = (
    *("attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types"),
    *("max_position_embeddings", "max_window_layers", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "original_max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("sliding_window", "use_sliding_window", "vocab_size"),
)
_OF_THE_DRAFT = (
    *("block_size", "compression_config", "draft_vocab_size", "mask_token_id", "quantization_config"),
    "sliding_window_non_causal",
)
# What the format's config of another algorithm has beside a plain draft's, with its meaning where it is absent.
_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_ADDED: dict[str, dict[str, Any]] = {
    DFLASH2: {**_SIZES, "sliding_window_non_causal": True},
    DSPARK: {"markov_rank": 256, "markov_head_type": "vanilla"},
}
_ARCHITECTURE = {DFLASH2: "DFlash2DraftModel", DSPARK: "Qwen3DSparkModel"}
# Copied from the target: the package's rotary embedding rotates whole heads.
_OF_PARTIAL_HEADS = ("partial_rotary_factor", "rope_dim")


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a raw config.json nests the decoder, which no other format does."""
    return isinstance(config.get(DECODER), Mapping)


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators config.json with z-lab's fields: a Qwen3 decoder at the top level, `target_layer_ids`.

    Only fields that the speculators package's own classes read are taken, each from the level where they read it.
    The format counts a feature's layer by the layers before it, z-lab by the layer itself: [2, 10, 18, 26, 34]
    there is [1, 9, 17, 25, 33] here. The ids ascend here: training feeds features in the order of the layers.
    Raises DraftConfigError for layer ids that are malformed, and for features of another width.
    """
    decoder = config[DECODER]
    width = config.get("target_hidden_size")
    if width is not None and width != decoder.get("hidden_size"):
        expected = f"null or the draft's hidden_size of {decoder.get('hidden_size')}"
        fix = "Serve a draft whose features are as wide as its layers."
        raise DraftConfigError("target_hidden_size", width, expected, fix)
    top = {name: value for name, value in config.items() if value is not None}
    algorithm = str(config.get(ALGORITHM))
    added = _ADDED.get(algorithm, {})
    return {
        **_taken(decoder, _OF_THE_DECODER),
        **_head_dim(decoder),
        **_rope(decoder),
        **_taken(top if top.keys() & set(_DTYPE) else decoder, _DTYPE),
        **added,
        **_taken(top, (*_OF_THE_DRAFT, *added)),
        "architectures": [_ARCHITECTURE.get(algorithm, "DFlashDraftModel")],
        "model_type": "qwen3",
        "target_layer_ids": _target_layer_ids(config),
    }


def _taken(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: config[name] for name in names if name in config}


def _head_dim(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """What a Llama decoder has without `head_dim`; a Qwen3 one has DraftSpec's default."""
    if decoder.get("model_type") != "llama" or decoder.get("head_dim") is not None:
        return {}
    hidden, heads = decoder.get("hidden_size"), decoder.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return {}  # which DraftSpec refuses
    return {"head_dim": hidden // heads}


def _rope(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding of whole heads; of ropes by layer type the sliding layers', which all layers have."""
    found = _taken(decoder, ("rope_parameters", "rope_scaling"))
    for source, params in found.items():
        if isinstance(params, Mapping):
            params = params.get("sliding_attention", params)
        if isinstance(params, Mapping):
            params = {key: value for key, value in params.items() if key not in _OF_PARTIAL_HEADS}
        found[source] = params
    return found


def _target_layer_ids(config: Mapping[str, Any]) -> list[int] | None:
    ids = config.get(LAYER_IDS)
    if ids is None:
        return None  # which DraftSpec refuses
    valid = isinstance(ids, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not valid or not ids or min(ids) < 1 or len(set(ids)) < len(ids):
        expected = "a non-empty list of integers >= 1, each once (1 is the output of the target's first layer)"
        fix = f"Write the layers that the draft was trained on into {LAYER_IDS} of its config.json."
        raise DraftConfigError(LAYER_IDS, ids, expected, fix)
    return [i - 1 for i in sorted(ids)]
