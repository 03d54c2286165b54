"""Start-up without SGLang: the launcher's and the scheduler's checks on a draft in a directory."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_sglang import hooks
from dflash_sglang.startup import decisions
from dflash_sglang.startup.facts import StartupError
from tests.support.fakes import Algorithm, arguments, built_in, target_model


def launch(directory: Path, **overrides: Any) -> type:
    """The worker's class, for `target_model`; server arguments stand for SGLang's views of them."""
    with pytest.MonkeyPatch.context() as patch:
        fake_views(patch)
        return hooks.create_worker(built_in, Algorithm(), arguments(directory, **overrides))


def fake_views(patch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Puts `target_model`, which it returns, and the server arguments in place of SGLang's views of them."""
    config = target_model()
    patch.setattr(decisions, "resolving_view", lambda args: args)
    patch.setattr(decisions, "model_config_of", lambda args: config)
    patch.setattr(decisions, "mambaish_config", lambda config: None)
    patch.setattr(decisions, "draft_model_config_of", lambda args, path: SimpleNamespace(dtype=torch.float32))
    patch.delenv("DFLASH_SGLANG_REQUIRE", raising=False)
    patch.delenv("DFLASH_SGLANG_CONFIG", raising=False)
    return config


def hook_configs(patch: pytest.MonkeyPatch) -> None:
    """Puts the plugin's hooks on SGLang's reading of a config.json, which SGLang does where it starts."""
    from sglang.srt.configs import model_config
    from sglang.srt.utils import hf_transformers_utils
    from sglang.srt.utils.hf_transformers.config import HfModelConfigParser

    hooked = functools.partial(hooks.get_config, hf_transformers_utils.get_config)
    for module in (hf_transformers_utils, model_config):
        patch.setattr(module, "get_config", hooked)

    original = HfModelConfigParser.parse

    def parse(parser: Any, *args: Any, **kwargs: Any) -> Any:
        return hooks.parse_config(original, parser, *args, **kwargs)

    patch.setattr(HfModelConfigParser, "parse", parse)


def refusal(directory: Path, **overrides: Any) -> str:
    """The one problem that ends start-up."""
    with pytest.raises(StartupError) as caught:
        launch(directory, **overrides)
    assert str(caught.value).count("\n") == 1, caught.value
    return str(caught.value).splitlines()[1].removeprefix("  - ")


def change(directory: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Changes fields and tensors of a checkpoint; None removes."""
    old = json.loads((directory / "config.json").read_text())
    for key, value in config.items():
        merged = {**old[key], **value} if isinstance(value, dict) and key in old else value
        old[key] = merged
    kept = {key: value for key, value in old.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    held = {**load_file(directory / "model.safetensors"), **tensors}
    save_file({k: v for k, v in held.items() if v is not None}, directory / "model.safetensors")
    return directory


def refused(draft: str, message: str | None = None) -> pytest.MarkDecorator:
    return pytest.mark.matrix(draft=draft, outcome="refused", message=message)
