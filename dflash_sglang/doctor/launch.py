"""The launch that the flags describe, as SGLang's own parser reads it, and what start-up says of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_sglang import hooks
from dflash_sglang.checkpoint import DraftConfigError
from dflash_sglang.checkpoint.families import mixed_up
from dflash_sglang.checkpoint.fields import described, one_line, shown
from dflash_sglang.checkpoint.files import (
    TensorFacts,
    config_directory,
    missing_files,
    no_such_directory,
    read_config,
    tensor_facts,
)
from dflash_sglang.patches.apply import registered
from dflash_sglang.platforms.cpu import NAME as CPU_PLATFORM
from dflash_sglang.settings.plugin_config import CONFIG_ENV, REQUIRE_ENV, PluginConfigError
from dflash_sglang.sglang_names.probe import SGLangMismatchError
from dflash_sglang.startup.facts import StartupError, TargetFacts

_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Flags that published model cards name, by what this SGLang calls them.
RENAMED = {
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
}
_AT_LEAST_ONE = ("tp_size", "max_total_tokens")
OURS, BUILT_IN = "dflash_sglang", "built-in"


class Unreadable(ValueError):
    """A flag or a checkpoint that cannot be read; names it, its value and what was expected."""


def refusal(field: str, text: str) -> dict[str, str]:
    """One reason why the launch would end; text: the line that start-up writes of it."""
    return {"field": field, "text": text}


class Checkpoints(NamedTuple):
    """The directories of target and draft on this machine, and the target's tensors by name."""

    target: Path
    draft: Path
    tensors: dict[str, TensorFacts]


def read_checkpoints(server_args: Any) -> Checkpoints:
    """Raises Unreadable where one of them is not on this machine, has no config.json, or is a target whose files
    are not whole."""
    target = server_args.model_path
    directories, configs = [], []
    for flag, path, revision in (
        ("--target", target, server_args.revision),
        ("--draft", server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision),
    ):
        try:
            directory = config_directory(path, revision)
            configs.append(read_config(directory))
        except (OSError, ValueError) as error:
            elsewhere = not (Path(path).exists() or no_such_directory(path))
            fix = "doctor downloads nothing: give a directory, or download it first" if elsewhere else "Correct it"
            expected = f"expected a directory, or a downloaded repository, with a config.json ({described(error)})"
            raise Unreadable(f"{flag} {path}: {expected}. {fix}.") from error
        directories.append(directory)
    same = directories[0].resolve() == directories[1].resolve()
    if (mistake := mixed_up(configs[0], configs[1], same)) is not None:
        raise Unreadable(f"--target {target}: {mistake}")
    try:
        missing = missing_files(directories[0])
        tensors = tensor_facts(directories[0])
    except DraftConfigError as error:
        found = f"{error.field}={shown(error.value)}: expected {error.expected}. {error.fix}"
        raise Unreadable(f"--target {target}: {found}") from error
    if missing:
        files = one_line(", ".join(missing), 200)
        raise Unreadable(f"--target {target}: expected the files of its index: {files}. Download them.")
    return Checkpoints(directories[0], directories[1], tensors)


def read_flags(target: str, draft: str, flags: Sequence[str]) -> Any:
    """SGLang's ServerArgs of the launch, as parsed, with a device. Raises Unreadable."""
    from dflash_sglang.sglang_names.launcher import prepare_server_args

    paths = ["--model-path", target, "--speculative-draft-model-path", draft]
    given = [*paths, "--speculative-algorithm", "DFLASH", "--log-level", "error", *flags]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            server_args = prepare_server_args(given)
    except SystemExit as error:
        raise Unreadable(_last_error(said.getvalue(), flags)) from error
    except (ValueError, OSError) as error:  # of --config
        raise Unreadable(f"launch flags {list(flags)}: expected those of sglang ({described(error)})") from error
    asked = server_args.speculative_algorithm
    if asked is None or asked.upper() != "DFLASH":
        raise Unreadable(f"--speculative-algorithm {asked}: expected DFLASH. Remove it.")
    if server_args.device is None:
        server_args.device = "cpu" if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM else "cuda"
    return server_args


def settle(server_args: Any) -> list[dict[str, str]]:
    """Take SGLang's steps that need no GPU, which `verdict_of` builds on.

    Returns the refusals that end the launch in them. Raises Unreadable for flags that SGLang refuses.
    """
    from dflash_sglang.sglang_names.launcher import settle_without_device

    given = ((f"--{name.replace('_', '-')}", getattr(server_args, name)) for name in _AT_LEAST_ONE)
    if below := [(flag, value) for flag, value in given if value is not None and value < 1]:
        return [refusal(flag, f"{flag}={value}: expected an integer >= 1. Correct it.") for flag, value in below]
    try:
        settle_without_device(server_args)
    except (StartupError, PluginConfigError, SGLangMismatchError) as error:
        return _refusals(error)
    except (ValueError, AssertionError) as error:
        raise Unreadable(f"launch flags: expected those of sglang ({described(error)})") from error
    return []


def read_target(server_args: Any) -> Any:
    """SGLang's ModelConfig of the target. Raises Unreadable."""
    from dflash_sglang.sglang_names.launcher import model_config_of

    path, context = server_args.model_path, server_args.context_length
    try:
        config = model_config_of(server_args)
        TargetFacts.from_config(config.hf_text_config)
    except Exception as error:  # whatever its libraries raise
        expected, fix = f"--target {path}: expected a config.json that SGLang can read", "Correct it."
        if context is not None and "context_length" in str(error):
            expected, fix = f"--context-length {context}: expected at most the context of the target", "Lower it."
        raise Unreadable(f"{expected} ({described(error)}). {fix}") from error
    if not isinstance(config.dtype, torch.dtype):
        raise Unreadable(f"--target {path}: target config dtype={config.dtype!r}: expected a dtype. Correct it.")
    for field in _COUNTS:
        value = getattr(config.hf_text_config, field, 1)  # by another name where it is absent
        if not isinstance(value, int) or value < 1:
            found = f"target config {field}={shown(value)}: expected an integer >= 1"
            raise Unreadable(f"--target {path}: {found}. Correct it.")
    return config


def verdict_of(server_args: Any) -> dict[str, Any]:
    """What the checks of start-up say: `worker`, `why_built_in` and `refused` of the findings."""
    try:
        other = hooks.check_launch(server_args)
    except (StartupError, PluginConfigError, SGLangMismatchError, SystemExit) as error:
        return {"worker": None, "refused": _refusals(error)}
    return {"worker": OURS} if other is None else {"worker": BUILT_IN, "why_built_in": str(other)}


def _refusals(error: BaseException) -> list[dict[str, str]]:
    """Of an error that ends start-up."""
    if isinstance(error, StartupError):
        return [refusal(problem.field, str(problem)) for problem in error.problems]
    if isinstance(error, PluginConfigError):
        variable = re.match(r"DFLASH_SGLANG_\w+", str(error))
        return [refusal(variable[0] if variable else CONFIG_ENV, one_line(error, 2000))]
    if isinstance(error, SystemExit):
        return [refusal(REQUIRE_ENV, one_line(error, 2000))]
    return [refusal("sglang", one_line(error, 4000))]


@functools.cache
def load_plugins() -> None:
    """Import SGLang and load its plugins, as each of its processes does.

    Imports make millions of objects that stay. Python's collector would look through them again and again, which
    takes 40 % of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        from sglang.srt.plugins import load_plugins as load

        from dflash_sglang.sglang_names import launcher  # noqa: F401 (imported here for its time)

        load()
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def plugin_refusal() -> dict[str, str] | None:
    """Where SGLang did not load this package's plugin: its built-in worker would run without a word."""
    if registered():
        return None
    value = os.environ.get("SGLANG_PLUGINS")
    text = f"SGLANG_PLUGINS={value!r}: expected dflash_sglang among them, or unset. SGLang loads no such plugin."
    return refusal("SGLANG_PLUGINS", text)


def _last_error(printed: str, flags: Sequence[str]) -> str:
    """The message of argparse's usage error, and the new names of flags that SGLang has renamed."""
    message = one_line(printed.strip().splitlines()[-1].partition("error: ")[2] if printed.strip() else "")
    old = [name for name in dict.fromkeys(flag.partition("=")[0] for flag in flags) if name in RENAMED]
    return ". ".join([message, *(f"{name} is now {RENAMED[name]}" for name in old)])
