"""Gathers the facts of a launch from SGLang's server arguments and decides which worker runs it, if any."""

from __future__ import annotations

from typing import Any

from dflash_sglang.checkpoint import draft_config, tensor_facts
from dflash_sglang.compat_args import mambaish_config, model_config_of, resolving_view
from dflash_sglang.config import DraftConfigError, DraftSpec
from dflash_sglang.families import Foreign, foreign
from dflash_sglang.quantisation import quantisation_problems
from dflash_sglang.validation import (
    GPU_DRAFT_BACKENDS,
    ParallelFacts,
    Problem,
    ServingFacts,
    StartupError,
    TargetFacts,
    config_problem,
    draft_problems,
    serving_problems,
)

_KV_POOL_FLAGS = {
    "enable_unified_memory": "--enable-unified-memory",
    "enable_page_major_kv_layout": "--enable-page-major-kv-layout",
    "enable_kv_cache_sharding": "--enable-kv-cache-sharding",
}

# Launches of features that this package's worker does not take part in: field, its flag, value when off, reason.
_FLAGS_OF_THE_BUILT_IN_WORKER = (
    ("enable_dp_attention", "--enable-dp-attention", False, "data-parallel attention"),
    ("disaggregation_mode", "--disaggregation-mode", "null", "prefill and decode on different servers"),
    (
        "speculative_draft_window_size",
        "--speculative-draft-window-size",
        None,
        "a window imposed on the draft",
    ),
    ("enable_two_batch_overlap", "--enable-two-batch-overlap", False, "two overlapping halves of a batch"),
)

# Features that would silently do something else under speculation: field, its flag, value when off, why.
_REFUSED_FEATURES = (
    (
        "return_hidden_states_mode",
        "--enable-return-hidden-states",
        None,
        "unset with DFLASH: the hidden states of a verify go to the draft",
    ),
    (
        "enable_watermark",
        "--enable-watermark",
        False,
        "unset with DFLASH, which does not watermark",
    ),
)


def check_startup(server_args: Any) -> Foreign | None:
    """None when this package's worker can run the launch, else why the built-in worker does.

    Works on server arguments before and after SGLang resolved the speculative ones. Raises StartupError
    listing every problem, OSError where the draft's config.json cannot be found, and PluginConfigError.
    """
    cfg = resolving_view(server_args)
    if cfg.speculative_algorithm is None:
        return None  # --enable-return-aux-hidden-states reads DFLASH as a way to capture, and runs no worker
    if not _our_device(cfg.device):
        return Foreign("--device", cfg.device, "a device without kernels of this package")
    for field, flag, off, reason in _FLAGS_OF_THE_BUILT_IN_WORKER:
        if getattr(cfg, field) != off:
            return Foreign(flag, getattr(cfg, field), reason)
    serving, parallel = _serving_facts(cfg), _parallel_facts(cfg)
    problems = list(serving_problems(serving, parallel))
    for field, flag, off, expected in _REFUSED_FEATURES:
        if getattr(cfg, field) != off:
            fix = f"Remove {flag}, or serve without speculation."
            problems.append(Problem(flag, getattr(cfg, field), expected, fix))
    if serving.draft_path is None:
        raise StartupError(problems)
    config, directory = draft_config(serving.draft_path, cfg.speculative_draft_model_revision)
    target_config = model_config_of(server_args)
    other = foreign(config, directory) or _recurrent(target_config)
    if other is not None:
        return other
    problems += quantisation_problems(
        config, cfg.speculative_draft_model_quantization, cfg.quantization, cfg.device
    )
    try:
        spec = DraftSpec.from_config(config)
    except DraftConfigError as error:
        raise StartupError([*problems, config_problem(error)]) from error
    target = TargetFacts.from_config(target_config.hf_text_config)
    problems += draft_problems(spec, target, parallel, serving, tensor_facts(directory))
    if problems:
        raise StartupError(problems)
    return None


def _recurrent(target_config: Any) -> Foreign | None:
    """A target whose recurrent state has to be committed for the accepted rows only."""
    if mambaish_config(target_config) is None:
        return None
    architectures = target_config.hf_config.architectures
    return Foreign("target config architectures", architectures, "a target with recurrent layers")


def _our_device(device: str) -> bool:
    """CUDA, and the CPU through this package's own platform."""
    return device.startswith("cuda") or device == "cpu"


def _serving_facts(cfg: Any) -> ServingFacts:
    return ServingFacts(
        draft_path=cfg.speculative_draft_model_path,
        block_size=cfg.speculative_dflash_block_size or cfg.speculative_num_draft_tokens,
        draft_attention_backend=cfg.speculative_draft_attention_backend,
        supported_backends=("torch_native",) if cfg.device == "cpu" else GPU_DRAFT_BACKENDS,
        kv_pool_flag=next((flag for field, flag in _KV_POOL_FLAGS.items() if getattr(cfg, field)), None),
        draft_kv_dtype=cfg.speculative_draft_kv_cache_dtype or cfg.kv_cache_dtype,
    )


def _parallel_facts(cfg: Any) -> ParallelFacts:
    return ParallelFacts(
        draft_tp_size=max(1, cfg.tp_size // (cfg.attn_dp_size * cfg.attn_cp_size)), pp_size=cfg.pp_size
    )
