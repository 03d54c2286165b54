"""Which context and block positions each draft layer attends to: layer types, causality, windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, as_bool, as_int

LayerKind = Literal["full_attention", "sliding_attention"]

_FULL_LAYERS = 28  # max_window_layers of transformers' Qwen3 where a config has none


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one draft layer."""

    kind: LayerKind
    causal: bool  # else every query of the block sees the whole block, within the window
    window: int | None  # with the query's own position: keys in (q - window, q], or |q - k| < window if not causal


def layer_attention(fields: Fields, num_layers: int, window: int | None = None) -> tuple[LayerAttention, ...]:
    """One LayerAttention per draft layer. ``window``: that a flag gives sliding layers, where the config has none.

    ==================  ======================  ==========================  =============  ================
    is_causal (top)     dflash_config.causal    sliding_window_non_causal   full layers    sliding layers
    ==================  ======================  ==========================  =============  ================
    present             any                     any                         is_causal      is_causal
    absent              present                 any                         causal         causal
    absent              absent                  true                        non-causal     non-causal
    absent              absent                  false                       non-causal     causal
    absent              absent                  absent, `layer_types`       non-causal     causal
                                                present
    absent              absent                  absent, `layer_types`       non-causal     non-causal
                                                absent (`use_swa`)
    ==================  ======================  ==========================  =============  ================

    Raises DraftConfigError for a wrong number of layer types, an unknown one, or a sliding layer
    without a window in use.
    """
    kinds = _kinds(fields, num_layers)
    window = _window(fields, window) if "sliding_attention" in kinds else None
    return tuple(
        LayerAttention(kind, _causal(fields, kind), window if kind == "sliding_attention" else None)
        for kind in kinds
    )


def _causal(fields: Fields, kind: LayerKind) -> bool:
    is_causal = fields.text.get("is_causal")
    if is_causal is not None:
        return as_bool(("is_causal", is_causal))
    causal = fields.nested.get("causal")
    if causal is not None:
        return as_bool(("dflash_config.causal", causal))
    if kind == "full_attention":
        return False
    return not as_bool(fields.draft("sliding_window_non_causal", fields.text.get("layer_types") is None))


def _kinds(fields: Fields, num_layers: int) -> tuple[LayerKind, ...]:
    """`layer_types`, or what is said in place of them."""
    types = fields.text.get("layer_types")
    if types is None:
        full = _full_before_sliding(fields, num_layers)
        return tuple("full_attention" if i < full else "sliding_attention" for i in range(num_layers))
    if not isinstance(types, list | tuple) or len(types) != num_layers:
        expected = f"a list of {num_layers} layer types, one per draft layer (num_hidden_layers={num_layers})"
        fix = "Make layer_types and num_hidden_layers agree in the draft's config.json."
        raise DraftConfigError("layer_types", types, expected, fix)
    for i, kind in enumerate(types):
        if kind not in ("full_attention", "sliding_attention"):
            fix = "This worker has no other draft layer; serve a checkpoint of these layer types."
            raise DraftConfigError(f"layer_types[{i}]", kind, "full_attention or sliding_attention", fix)
    return tuple(types)


def _full_before_sliding(fields: Fields, num_layers: int) -> int:
    """How many layers are full, of a config without `layer_types`: all, or none with `dflash_config.use_swa`. With
    `use_sliding_window` the layers from `max_window_layers` on slide, as in transformers' Qwen3."""
    if as_bool(fields.draft("use_swa", False)):
        return 0
    null = "sliding_window" in fields.text and fields.text["sliding_window"] is None
    if as_bool(fields.shape("use_sliding_window", False)) and not null:
        return min(as_int(fields.shape("max_window_layers", _FULL_LAYERS), 0), num_layers)
    return num_layers


def _window(fields: Fields, of_flag: int | None) -> int:
    window, unused = fields.text.get("sliding_window"), fields.text.get("use_sliding_window") is False
    if window is not None and not unused:
        return as_int(("sliding_window", window), 1)
    field, window = fields.draft("swa_window_size", fields.nested.get("sliding_window"))
    if window is not None:
        return as_int((field, window), 1)
    if unused:
        expected = "true beside sliding_attention layers: transformers gives them no window otherwise"
        fix = "Set it to true if the draft was trained with its sliding_window, else name full_attention layers."
        raise DraftConfigError("use_sliding_window", False, expected, fix)
    if of_flag is not None:
        return of_flag
    fix = (
        "Set --speculative-draft-window-size to the window that the draft was trained with, or add sliding_window "
        "to its config.json."
    )
    raise DraftConfigError("sliding_window", None, "the window of the sliding_attention layers, in tokens", fix)
