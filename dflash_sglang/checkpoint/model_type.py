"""What transformers fills in for a field that a config.json leaves out, by its model_type."""

from __future__ import annotations

from typing import Any

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields

# The classes of nearly all drafts, which agree.
_COMMON = ("qwen3", "llama")
_COMMON_DEFAULTS = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "rms_norm_eps": 1e-6}


def class_default(fields: Fields, name: str) -> Any:
    """The value of field `name` in the transformers class of the draft's `model_type` (Qwen3's without one).

    The class that wrote a config.json made the layers that were trained, and every server reads the file through
    that class. Raises DraftConfigError where transformers has no such class, or the class no such field.
    """
    model_type = fields.text.get("model_type") or "qwen3"
    if model_type in _COMMON:
        return _COMMON_DEFAULTS[name]
    # Imported here: most configs leave nothing out.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    value = None
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        try:
            value = getattr(CONFIG_MAPPING[model_type](), name, None)
        except (ValueError, OSError) as error:
            raise DraftConfigError(
                "model_type", model_type, f"the type of a language model ({error})", "Correct it in config.json."
            ) from error
    if value is None:
        raise DraftConfigError(
            name,
            None,
            f"its value, which transformers does not fill in for model_type={model_type!r}",
            f"Add {name} (the one that the draft was trained with) to its config.json.",
        )
    return value
