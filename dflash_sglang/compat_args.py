"""The SGLang names that read server arguments, apart from `compat.py` because the launcher needs no more."""

from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

__all__ = ["model_config_of", "resolving_view"]
