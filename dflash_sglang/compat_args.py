"""The SGLang names that read server arguments, apart from `compat.py` because the launcher needs no more."""

from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.hybrid_arch import mambaish_config

__all__ = ["mambaish_config", "model_config_of", "resolving_view"]
