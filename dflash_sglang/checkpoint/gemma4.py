"""DSpark drafts of Gemma 4's layers: their config.json, which is that of a Gemma 4 text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_sglang.checkpoint.fields import LARGEST, DraftConfigError, Fields, as_float, as_int

_ACTIVATION = "gelu_pytorch_tanh"
_FULL = "full_attention"
_FIX = "No worker has other layers for this architecture; serve a draft that was trained with these."


def gemma4_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json with z-lab's fields: the heads and the rope of full attention, which all layers have.

    A checkpoint of this kind has an embedding and a head of its own. Rows of the embedding are scaled by the
    square root of the hidden size, and `final_logit_softcapping` caps the head's logits.
    Raises DraftConfigError for a field that is missing or malformed, and for layers of another form.
    """
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or any(kind != _FULL for kind in kinds):
        raise DraftConfigError("layer_types", kinds, f"a list of {_FULL}, one for each draft layer", _FIX)
    if config.get("attention_k_eq_v") is not True:
        expected = "true: k_proj gives the values, too, and the checkpoint has no v_proj"
        raise DraftConfigError("attention_k_eq_v", config.get("attention_k_eq_v"), expected, _FIX)
    if config.get("hidden_activation") != _ACTIVATION:
        raise DraftConfigError("hidden_activation", config.get("hidden_activation"), _ACTIVATION, _FIX)
    ropes = config.get("rope_parameters")
    rope = ropes.get(_FULL) if isinstance(ropes, Mapping) else None
    if not isinstance(rope, Mapping):
        raise DraftConfigError("rope_parameters", ropes, f"an object with {_FULL}, the rope of every draft layer")
    head_dim = as_int(("global_head_dim", config.get("global_head_dim")), 2)
    if rope.get("rope_type") == "proportional":  # with frequencies of whole heads, of which the fastest turn
        field = "partial_rotary_factor"
        factor = as_float((f"rope_parameters.{_FULL}.{field}", rope.get(field, 1.0)))
        rope = {**rope, "rope_dim": 2 * int(min(factor * head_dim, LARGEST - 1) // 2)}
    own = {
        "input_embedding_scale": as_int(("hidden_size", config.get("hidden_size")), 1) ** 0.5,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "has_embed_tokens": True,
        "has_lm_head": True,
    }
    return {
        **{name: value for name, value in config.items() if name not in ("hidden_act", "hidden_activation")},
        "model_type": "qwen3",
        "head_dim": head_dim,
        "num_key_value_heads": as_int(("num_global_key_value_heads", config.get("num_global_key_value_heads")), 1),
        "rope_parameters": dict(rope),
        "dflash_config": {**Fields(config).nested, **own},
    }
