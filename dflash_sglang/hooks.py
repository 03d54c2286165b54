"""The hooks that choose the worker: start-up checks in the launcher, the draft's config, the worker itself."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_sglang.checkpoint import flattened, is_speculators, read_config
from dflash_sglang.checkpoint.families import DSPARK, GEMMA4, Foreign, family_of, foreign
from dflash_sglang.checkpoint.files import draft_config
from dflash_sglang.checkpoint.gemma4 import gemma4_fields
from dflash_sglang.checkpoint.mtp import MtpSpec, holds_mtp
from dflash_sglang.patches import contract
from dflash_sglang.patches.apply import apply, replaced, verify
from dflash_sglang.settings.plugin_config import REQUIRE_ENV, PluginConfig, check_environment, required
from dflash_sglang.sglang_names.probe import check_symbols
from dflash_sglang.startup.launch_checks import unserved_problems
from dflash_sglang.startup.mtp_checks import UNSERVED_WITH_MTP

logger = logging.getLogger(__name__)

_resolved: Any = None  # the server arguments that this process resolved last; a launcher does


def handle_missing_default_values(original: Callable[..., None], server_args: Any) -> None:
    """AROUND serving_hook.handle_missing_default_values: runs in the launcher, where SGLang looks for a device.

    For DFLASH: raises StartupError that names the CPU platform on a machine without a device, SGLangMismatchError
    and PluginConfigError.
    """
    if _asks_for_dflash(server_args):
        _check_sglang()
        check_symbols("dflash_sglang.sglang_names.launcher")
        from dflash_sglang.startup.device_check import check_device

        check_device(server_args.device)
    original(server_args)


def handle_speculative_decoding(original: Callable[..., None], server_args: Any) -> None:
    """AROUND speculative_hook.handle_speculative_decoding: runs in the launcher, before any process starts.

    For DFLASH: raises StartupError, SGLangMismatchError or PluginConfigError where the launch cannot work.
    It runs before SGLang reads the draft's config, so that the errors of a bad one are ours, and a dense draft may
    be asked for in fp8.
    """
    global _resolved
    _resolved = server_args
    if _asks_for_dflash(server_args) and _served_by_built_in(server_args) is None:
        # Imported here: they need names of SGLang's, which are checked by now.
        from sglang.srt.arg_groups import speculative_hook

        from dflash_sglang.startup.decisions import serve_trained_block
        from dflash_sglang.startup.fp8_drafts import quantise_where_shorter
        from dflash_sglang.startup.prefill_graphs import settle_prefill_graphs

        _patch_launcher()
        serve_trained_block(server_args)
        quantise_where_shorter(server_args)
        settle_prefill_graphs(server_args)
        # What SGLang asks of data-parallel attention, a GPU and --enable-dp-lm-head, is for its own worker.
        with replaced("dp-attention", speculative_hook, lambda cfg: False):
            original(server_args)
    else:
        _tell_of_dflash(server_args)
        original(server_args)


def check_launch(server_args: Any) -> Foreign | None:
    """The launcher's checks of a launch with DFLASH, for a process that starts none.

    Returns why the built-in worker would serve it, or None. Raises as `handle_speculative_decoding` does, and
    SystemExit where DFLASH_SGLANG_REQUIRE=1 forbids the built-in worker.
    """
    global _resolved
    _resolved = server_args
    return _served_by_built_in(server_args)


def create_worker(original: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """AROUND SpeculativeAlgorithm.create_worker: runs in the scheduler, once the target is loaded.

    Returns this package's worker class, by the server's role, for a draft that it serves, and what SGLang would
    return otherwise.
    An exception here ends the scheduler: nothing falls back by accident.
    """
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    other = _served_by_built_in(server_args)
    if other is not None:
        logger.warning("%s", other)
        return original(algorithm, server_args)
    check_symbols("dflash_sglang.sglang_names.scheduler")
    # Imported here: the registry imports every model of SGLang, and only the scheduler needs them.
    from sglang.srt.models.registry import ModelRegistry

    from dflash_sglang.prefill_worker import PrefillWorker
    from dflash_sglang.worker import DFlashWorker

    ModelRegistry.register("dflash_sglang.models", overwrite=True, strict=True)
    path, revision = server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
    if holds_mtp(draft_config(path, revision)):
        ModelRegistry.register("dflash_sglang.models.mtp", overwrite=True, strict=True)
    _patch_scheduler()
    return PrefillWorker if server_args.disaggregation_mode == "prefill" else DFlashWorker


def parse_config(original: Callable[..., Any], parser: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND HfModelConfigParser.parse: runs wherever SGLang reads a model's config.json, and acts under DFLASH.

    transformers knows no speculators config, and SGLang reads none of a Gemma 4 text model by itself. Such a
    config becomes that of its decoder with z-lab's fields, from which SGLang takes block size, target layers and
    the shape of the KV pool. Start-up validation has read it before, and refuses the launch of any worker but
    ours.
    """
    if _dflash_launch() is None:
        return original(parser, model, *args, **kwargs)
    _check_sglang()  # here too: the launcher's hooks may be the ones that are lost
    from transformers import AutoConfig, PretrainedConfig

    if kwargs.keys() & {"gguf_file", "_configuration_file"}:  # it is elsewhere
        return original(parser, model, *args, **kwargs)
    if Path(model, "config.json").is_file():
        raw = read_config(model)
    else:
        raw, _ = PretrainedConfig.get_config_dict(model, revision=kwargs.get("revision"))
    of_gemma4 = family_of(raw) is GEMMA4
    if not (of_gemma4 or is_speculators(raw)) or foreign(raw) is not None:
        return original(parser, model, *args, **kwargs)
    config = AutoConfig.for_model(**(gemma4_fields(raw) if of_gemma4 else flattened(raw)))
    config._name_or_path = str(model)
    config._commit_hash = raw.get("_commit_hash")
    return config


def get_config(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hf_transformers.config.get_config: runs wherever SGLang reads a model's config, acts under DFLASH.

    --json-model-override-args is the target's: no key of it reaches the draft, whose checkpoint start-up has read.
    """
    launch = _dflash_launch()
    if launch is not None and kwargs.get("model_override_args"):
        from dflash_sglang.sglang_names.launcher import resolving_view  # imported here: other launches do without

        if model == resolving_view(launch).speculative_draft_model_path:
            kwargs["model_override_args"] = None
    return original(model, *args, **kwargs)


def config_draft_model(original: Callable[[Any], None], config: Any) -> None:
    """AROUND ModelConfig._config_draft_model, which each ModelConfig calls on a config of its own.

    Of a target's checkpoint as its own draft SGLang reads the config of the multi-token-prediction layers alone.
    """
    if config.is_draft_model and config.speculative_algorithm == "DFLASH":
        raw = draft_config(config.model_path, config.revision)
        if holds_mtp(raw):
            MtpSpec.from_config(raw).make_alone(config.hf_text_config)
    original(config)


def _tell_of_dflash(server_args: Any) -> None:
    """For a launch with an algorithm that is SGLang's own: says so where this package would serve the draft."""
    algorithm = (server_args.speculative_algorithm or "").upper()
    readers = {"DSPARK": _instead_of_dspark, "EAGLE": _instead_of_eagle, "NEXTN": _instead_of_eagle}
    try:
        instead = readers[algorithm](server_args) if algorithm in readers else None
    except (OSError, ValueError):  # a config.json that SGLang reports, or that this package does not serve
        return
    if instead is not None:
        logger.info("--speculative-algorithm %s runs SGLang's built-in worker. %s", algorithm, instead)


def _instead_of_dspark(server_args: Any) -> str | None:
    path = server_args.speculative_draft_model_path
    if path is None:  # the target holds its draft
        return None
    config = draft_config(path, server_args.speculative_draft_model_revision)
    if family_of(config) not in (DSPARK, GEMMA4) or foreign(config) is not None:
        return None
    return "With --speculative-algorithm DFLASH dflash_sglang serves this draft."


def _instead_of_eagle(server_args: Any) -> str | None:
    """Of a target whose own multi-token-prediction layers are the draft, in a launch that they could serve."""
    path = server_args.model_path
    if server_args.speculative_draft_model_path not in (None, path):
        return None
    if any(unserved_problems(UNSERVED_WITH_MTP, server_args)):  # before a config.json is fetched
        return None
    config = draft_config(path, server_args.revision)
    if not holds_mtp(config):
        return None
    MtpSpec.from_config(config)  # raises for layers that are not served
    return (
        f"With --speculative-algorithm DFLASH --speculative-draft-model-path {path} dflash_sglang drafts with the "
        "same multi-token-prediction layers."
    )


@functools.cache
def _patch_launcher() -> None:
    """Once in the process that answers requests; others do without the modules that are patched."""
    for level, line in contract.check(PluginConfig.from_env().accept_patches):
        logger.log(level, "%s", line)
    apply("launcher")


@functools.cache
def _patch_scheduler() -> None:
    """Once in a scheduler that runs this package's worker."""
    from dflash_sglang.patches.relay import keep_what_was_read

    apply("scheduler")
    keep_what_was_read()


def _dflash_launch() -> Any:
    """The server arguments of a launch with DFLASH, in its launcher and in processes that SGLang gave them; else
    None."""
    server_args = _resolved
    if server_args is None:
        from sglang.srt.runtime_context import get_server_args

        try:
            server_args = get_server_args()
        except ValueError:  # it was given none
            return None
    return server_args if _asks_for_dflash(server_args) else None


def _asks_for_dflash(server_args: Any) -> bool:
    """Whether a worker runs: with --enable-return-aux-hidden-states DFLASH names only a way to capture."""
    asked = (server_args.speculative_algorithm or "").upper() == "DFLASH"
    return asked and not server_args.enable_return_aux_hidden_states


def _check_sglang() -> None:
    """Raises SGLangMismatchError where SGLang's source does not fit the patches, or a hook does not act, and
    PluginConfigError."""
    check_environment(os.environ)
    contract.check(PluginConfig.from_env().accept_patches)
    verify()


def _served_by_built_in(server_args: Any) -> Foreign | None:
    """Why the built-in worker serves this launch, or None; ends start-up where it must not run or cannot."""
    _check_sglang()
    check_symbols("dflash_sglang.sglang_names.launcher")
    from dflash_sglang.startup.decisions import check_startup

    other = check_startup(server_args)
    if other is not None and required():
        raise SystemExit(f"{REQUIRE_ENV}=1: {other}")
    return other
