"""What vLLM's fields say of a draft's features, beside `target_layer_ids`."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, as_bool

_PLACES = ("dflash_config", "eagle_config", None)  # where vLLM looks; None is the top level
LAYER_INPUTS = "eagle_aux_hidden_state_layer_ids"
"""The target's layers by the number of layers before their output: one more than in `target_layer_ids`."""


def check_features(fields: Fields, layer_ids: Sequence[int] | None) -> None:
    """Raise DraftConfigError for a draft that is fed with anything but the outputs of `layer_ids`, joined by its
    `fc`, or that names two sets of layers.

    ``layer_ids``: the draft's `target_layer_ids`, None where its config leaves them to the default.
    """
    for place in _PLACES:
        given, path = (fields.top, "") if place is None else (fields.mapping(place), f"{place}.")
        used = given.get("use_aux_hidden_state")
        if used is not None and not as_bool((f"{path}use_aux_hidden_state", used)):
            raise DraftConfigError(
                f"{path}use_aux_hidden_state",
                used,
                "true: a draft whose fc joins the outputs of several layers of the target",
                "Serve a draft that was trained with them; this one takes the target's last hidden state alone.",
            )
        inputs = given.get(LAYER_INPUTS)
        if inputs is None:
            continue
        if layer_ids is None:
            raise DraftConfigError(
                f"{path}{LAYER_INPUTS}",
                inputs,
                "target_layer_ids beside it",
                "Write these numbers less 1 into dflash_config.target_layer_ids of the draft's config.json.",
            )
        shifted = [i + 1 for i in layer_ids]
        if inputs != shifted:
            raise DraftConfigError(
                f"{path}{LAYER_INPUTS}",
                inputs,
                f"{shifted}: each of target_layer_ids={list(layer_ids)} and 1, as vLLM counts them",
                "Keep the one that the draft was trained with in its config.json.",
            )
