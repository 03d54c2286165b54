"""A target's checkpoint as its own draft: SGLang reads the config of its multi-token-prediction layers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_sglang.checkpoint.files import draft_config
from dflash_sglang.checkpoint.mtp import MtpSpec, holds_mtp


def config_draft_model(original: Callable[[Any], None], config: Any) -> None:
    """AROUND ModelConfig._config_draft_model, which each ModelConfig calls on a config of its own."""
    if config.is_draft_model and config.speculative_algorithm == "DFLASH":
        raw = draft_config(config.model_path, config.revision)
        if holds_mtp(raw):
            MtpSpec.from_config(raw).make_alone(config.hf_text_config)
    original(config)
