"""The speculators format: the decoder nested in a config.json of its own, spelt the way z-lab spells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_sglang.config.fields import DraftConfigError

DECODER = "transformer_layer_config"
LAYER_IDS = "aux_hidden_state_layer_ids"
# Names under which the format's exporters save a plain DFlash draft.
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
# Of the exporter, or of the class that it saved: nothing of the draft.
_NOT_OF_THE_DRAFT = ("auto_map", "model_type", "transformers_version")


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a raw config.json nests the decoder, which no other format does."""
    return isinstance(config.get(DECODER), Mapping)


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators config.json with z-lab's fields: a Qwen3 decoder at the top level, `target_layer_ids`.

    The format counts a feature's layer by the layers before it, z-lab by the layer itself:
    [2, 10, 18, 26, 34] there is [1, 9, 17, 25, 33] here. Where both levels hold a field, the top level wins.
    Raises DraftConfigError for layer ids that are absent or malformed, and for features of another width.
    """
    decoder = {
        key: value
        for key, value in config[DECODER].items()
        if key not in _NOT_OF_THE_DRAFT and not key.startswith("_")
    }
    top = {key: value for key, value in config.items() if key not in (DECODER, LAYER_IDS, *_NOT_OF_THE_DRAFT)}
    if top.keys() & {"dtype", "torch_dtype"}:
        decoder = {key: value for key, value in decoder.items() if key not in ("dtype", "torch_dtype")}
    width = config.get("target_hidden_size")
    if width is not None and width != decoder.get("hidden_size"):
        raise DraftConfigError(
            "target_hidden_size",
            width,
            f"null or the draft's hidden_size of {decoder.get('hidden_size')}",
            "Serve a draft whose features are as wide as its layers.",
        )
    return {
        **decoder,
        **top,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "target_layer_ids": _target_layer_ids(config),
    }


def _target_layer_ids(config: Mapping[str, Any]) -> list[int]:
    ids = config.get(LAYER_IDS)
    valid = isinstance(ids, list | tuple) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
    if not valid or not ids or min(ids) < 1:
        raise DraftConfigError(
            LAYER_IDS,
            ids,
            "a non-empty list of integers >= 1 (1 is the output of the target's first layer)",
            f"Write the layers that the draft was trained on into {LAYER_IDS} of its config.json.",
        )
    return [i - 1 for i in ids]
