"""The hooks on SGLang: validation in the launcher, the draft's config, this package's worker in the scheduler."""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_sglang.checkpoint import flattened, is_speculators, read_config
from dflash_sglang.checkpoint.families import Foreign, foreign
from dflash_sglang.requests.checks import RequestChecks
from dflash_sglang.requests.errors import shown
from dflash_sglang.settings.plugin_config import REQUIRE_ENV, PluginConfig, required
from dflash_sglang.sglang_names.probe import check_symbols, check_version

logger = logging.getLogger(__name__)

_COMPONENTS = "sglang.srt.managers.scheduler_components"
_INTERNAL_STATE = f"{_COMPONENTS}.internal_state"
_LOGPROBS = f"{_COMPONENTS}.logprob_result_processor.SchedulerLogprobResultProcessor"
_WEIGHT_UPDATES = f"{_COMPONENTS}.weight_updater.SchedulerWeightUpdaterManager"

_resolved: Any = None  # the server arguments that this process resolved last; a launcher does


def hook_around(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Registers hooks AROUND functions of SGLang's. Raises where one does not exist: SGLang only logs that."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in hooks.items():
        pkgutil.resolve_name(target)
        HookRegistry.register(target, hook, HookType.AROUND)


def handle_speculative_decoding(original: Callable[..., None], server_args: Any) -> None:
    """AROUND speculative_hook.handle_speculative_decoding: runs in the launcher, before any process starts.

    For DFLASH: raises StartupError, SGLangMismatchError or PluginConfigError where the launch cannot work.
    It runs before SGLang reads the draft's config, so that the errors of a bad one are ours, and a dense draft may
    be asked for in fp8.
    """
    global _resolved
    _resolved = server_args
    if _asks_for_dflash(server_args) and _served_by_built_in(server_args) is None:
        # Imported here: it exists in the one version of SGLang that was checked.
        from dflash_sglang.sglang_names.launcher import our_dp_attention
        from dflash_sglang.startup.fp8_drafts import quantise_where_shorter

        _hook_tokenizer()
        quantise_where_shorter(server_args)
        with our_dp_attention():
            original(server_args)
    else:
        original(server_args)


def create_worker(original: Callable[..., type], algorithm: Any, server_args: Any) -> type:
    """AROUND SpeculativeAlgorithm.create_worker: runs in the scheduler, once the target is loaded.

    Returns this package's worker class for a draft that it serves, and what SGLang would return otherwise.
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

    from dflash_sglang.worker import DFlashWorker

    ModelRegistry.register("dflash_sglang.models", overwrite=True, strict=True)
    _hook_scheduler()
    return DFlashWorker


def parse_config(original: Callable[..., Any], parser: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND HfModelConfigParser.parse: runs wherever SGLang reads a model's config.json, and acts under DFLASH.

    transformers knows no speculators config. A DFlash one becomes the config of its decoder with z-lab's fields,
    from which SGLang takes block size, target layers and the shape of the KV pool. Start-up validation has
    read it before, and refuses the launch of any worker but ours.
    """
    if not _dflash_runs():
        return original(parser, model, *args, **kwargs)
    from transformers import AutoConfig, PretrainedConfig

    if kwargs.keys() & {"gguf_file", "_configuration_file"}:  # it is elsewhere
        return original(parser, model, *args, **kwargs)
    if Path(model, "config.json").is_file():
        raw = read_config(model)
    else:
        raw, _ = PretrainedConfig.get_config_dict(model, revision=kwargs.get("revision"))
    if not is_speculators(raw) or foreign(raw) is not None:
        return original(parser, model, *args, **kwargs)
    config = AutoConfig.for_model(**flattened(raw))
    config._name_or_path = str(model)
    config._commit_hash = raw.get("_commit_hash")
    return config


@functools.cache
def _hook_tokenizer() -> None:
    """The hooks of the process that answers requests; others do without the module that they are on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from dflash_sglang.patches.fatal_requests import create_tokenized_object

    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook_around({
        f"{manager}.__init__": start_tokenizer_manager,
        f"{manager}._create_tokenized_object": create_tokenized_object,
    })  # fmt: skip
    HookRegistry.apply_hooks()


def start_tokenizer_manager(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """AROUND TokenizerManager.__init__: runs while the schedulers start.

    Starlette streams through anyio, whose first task imports what it needs of asyncio: 15 to 60 ms, which would be
    the first stream's.
    """
    from anyio.from_thread import start_blocking_portal

    with start_blocking_portal():
        pass
    original(*args, **kwargs)


@functools.cache
def _hook_scheduler() -> None:
    """The hooks of a scheduler that runs our worker; other processes do without the modules that they are on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from dflash_sglang.patches import sessions
    from dflash_sglang.patches.attention_room import init_attention_backends

    controller = f"{_INTERNAL_STATE}.SchedulerInternalStateController"
    session = "sglang.srt.session"
    checks = RequestChecks(PluginConfig.from_env().width)
    hook_around({
        f"{controller}.get_internal_state": get_internal_state,
        f"{controller}._validate_accept_threshold": validate_accept_threshold,
        f"{_LOGPROBS}.add_logprob_return_values": add_logprob_return_values,
        f"{_WEIGHT_UPDATES}._select_runners": select_runners,
        "sglang.srt.speculative.dflash_utils.validate_dflash_request": checks,
        "sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu": resolve_seq_lens_cpu,
        "sglang.srt.managers.overlap_utils.resolve_forward_inputs": resolve_forward_inputs,
        f"{session}.session_controller.Session._concat_token_arrays": sessions.concat_token_arrays,
        f"{session}.streaming_session.StreamingSession.try_cache_finished_req": sessions.try_cache_finished_req,
        "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends": init_attention_backends,
    })  # fmt: skip
    HookRegistry.apply_hooks()
    # SGLANG_IS_IN_CI has SGLang void what it has gathered from the relay; a decode step reads it once more.
    pkgutil.resolve_name("sglang.srt.managers.overlap_utils")._DEBUG_ASSERT = False


def get_internal_state(original: Callable[..., Any], controller: Any, request: Any) -> Any:
    """AROUND SchedulerInternalStateController.get_internal_state: adds what our worker tells of its widths, as
    `dflash_width` of /server_info's `internal_states`."""
    output = original(controller, request)
    metrics = getattr(controller.scheduler.draft_worker, "width_metrics", None)  # of our worker alone
    if metrics is not None:
        output.internal_state["dflash_width"] = metrics()
    return output


def validate_accept_threshold(original: Callable[..., None], controller: Any, key: str, value: Any) -> None:
    """AROUND SchedulerInternalStateController._validate_accept_threshold, of /set_internal_state."""
    if float(value) != 1.0:
        rejected = pkgutil.resolve_name(f"{_INTERNAL_STATE}.UpdateRejected")
        raise rejected(f"{key}={shown(value)}: expected 1.0 with DFLASH, whose output is exactly the target's.")
    original(controller, key, value)


def add_logprob_return_values(
    original: Callable[..., int], processor: Any, i: int, req: Any, *args: Any, **kwargs: Any
) -> int:
    """AROUND SchedulerLogprobResultProcessor.add_logprob_return_values, of a prefill's results: a request for no
    new token has the logprob of none. Speculation samples one all the same."""
    count = original(processor, i, req, *args, **kwargs)
    if req.sampling_params.max_new_tokens == 0:
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()
    return count


def select_runners(
    original: Callable[..., list[tuple[str, Any]]], manager: Any, *args: Any, **kwargs: Any
) -> list[tuple[str, Any]]:
    """AROUND SchedulerWeightUpdaterManager._select_runners, which knows whose a weight update is: the draft's
    updater is told whether the target gets it too."""
    selected = original(manager, *args, **kwargs)
    for role, runner in selected:
        if role == "draft":
            runner.weight_updater.with_target = len(selected) > 1
    return selected


def resolve_seq_lens_cpu(original: Callable[..., None], future_map: Any, batch: Any, **kwargs: Any) -> None:
    """AROUND FutureMap.resolve_seq_lens_cpu: a decode step finds the lengths in the relay by itself.

    So they are gathered only where an attention backend wants them on the host; `batch.seq_lens` is of an earlier
    step until the blocks are built.
    """
    if future_map.needs_cpu_seq_lens or not batch.forward_mode.is_decode():
        original(future_map, batch, **kwargs)
        return
    if future_map.publish_ready is not None:
        future_map.publish_ready.wait()  # as SGLang's own does: the scheduler's stream is behind the last step
    batch.seq_lens_cpu = batch.seq_lens_sum = None


def resolve_forward_inputs(original: Callable[..., None], batch: Any, future_map: Any) -> None:
    """AROUND resolve_forward_inputs: a decode step finds the last tokens in the relay by itself."""
    if not batch.forward_mode.is_decode():
        original(batch, future_map)


def _dflash_runs() -> bool:
    """Whether this process is of a launch with DFLASH: its launcher, or one that SGLang gave its arguments."""
    server_args = _resolved
    if server_args is None:
        from sglang.srt.runtime_context import get_server_args

        try:
            server_args = get_server_args()
        except ValueError:  # it was given none
            return False
    return _asks_for_dflash(server_args)


def _asks_for_dflash(server_args: Any) -> bool:
    """Not with --enable-return-aux-hidden-states, which takes the name for a way to capture and runs no worker."""
    if (server_args.speculative_algorithm or "").upper() != "DFLASH":
        return False
    check_version()
    return not server_args.enable_return_aux_hidden_states


def _served_by_built_in(server_args: Any) -> Foreign | None:
    """Why the built-in worker serves this launch, or None; ends start-up where it must not run or cannot."""
    check_version()
    check_symbols("dflash_sglang.sglang_names.launcher")
    from dflash_sglang.startup.decisions import check_startup

    PluginConfig.from_env()
    other = check_startup(server_args)
    if other is not None and required():
        raise SystemExit(f"{REQUIRE_ENV}=1: {other}")
    return other
