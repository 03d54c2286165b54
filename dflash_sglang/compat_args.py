"""The SGLang names that read server arguments, apart from `compat.py` because the launcher needs no more."""

from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config

__all__ = ["hybrid_gdn_config", "mambaish_config", "model_config_of", "resolving_view"]
