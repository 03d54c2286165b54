"""A target's checkpoint as its own draft: SGLang reads the config of its multi-token-prediction layers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_sglang.checkpoint.files import draft_config
from dflash_sglang.checkpoint.mtp import MimoV2Spec, MtpSpec, alone, holds_mtp, mimo_v2_alone


def config_draft_model(original: Callable[[Any], None], config: Any) -> None:
    """AROUND ModelConfig._config_draft_model, which each ModelConfig calls on a config of its own."""
    if config.is_draft_model and config.speculative_algorithm == "DFLASH":
        raw = draft_config(config.model_path, config.revision)
        if holds_mtp(raw):
            spec = MtpSpec.from_config(raw)
            if isinstance(spec, MimoV2Spec):
                mimo_v2_alone(config.hf_text_config, spec)
            else:
                alone(config.hf_text_config, spec)
    original(config)
