"""Start-up without SGLang: the launcher's and the scheduler's checks on a draft in a directory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
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


def launch_arguments(target: Path, draft: Path | None, *extra: str) -> list[str]:
    """The command line of a launch on the CPU platform."""
    arguments = ["--model-path", str(target), "--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init"]
    arguments += ["--speculative-algorithm", "DFLASH", *extra]
    return arguments if draft is None else [*arguments, "--speculative-draft-model-path", str(draft)]


def resolved(target: Path, draft: Path | None, *extra: str) -> Any:
    """SGLang's resolved arguments of such a launch, or the problems that end the launcher, a line each."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(launch_arguments(target, draft, *extra))
    try:
        server_args.resolve_once()
    except StartupError as error:
        first, *problems = str(error).splitlines()
        assert first == "DFLASH cannot start:" and len(problems) == len(error.problems)
        return "\n".join(problem.removeprefix("  - ") for problem in problems)
    return server_args


def tells(said: object, text: str) -> bool:
    """Whether a message begins with the text, of which each " ... " stands for any other text."""
    first, *others = text.split(" ... ")
    return isinstance(said, str) and said.startswith(first) and all(part in said for part in others)


def hook_launcher(patch: pytest.MonkeyPatch) -> None:
    """Puts the plugin's hooks around SGLang's resolution of server arguments and its reading of configs."""
    from sglang.srt.arg_groups import resolution_hooks

    def resolve(server_args: Any, original: Callable[..., None]) -> None:
        hooks.handle_speculative_decoding(original, server_args)

    patch.setitem(resolution_hooks._HOOKS, "handle_speculative_decoding", [resolve])
    hook_configs(patch)
    patch.setattr(hooks, "_resolved", None)
    patch.delenv("DFLASH_SGLANG_REQUIRE", raising=False)
    patch.delenv("DFLASH_SGLANG_CONFIG", raising=False)


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
