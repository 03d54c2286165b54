"""What a prefill's CUDA graphs hold where the user has not said it: the whole forward, and as few as two tokens.

Between steps of a small target most of the scheduler's time goes to prefills (`docs/reference/optimisations.md`).
"""

from __future__ import annotations

import logging
from typing import Any

from dflash_sglang.sglang_names.launcher import (
    AttentionArch,
    CudaGraphBackend,
    attention_backends_of,
    declare_resolution,
    generate_prefill_cuda_graph_batch_sizes,
    mambaish_config,
    model_config_of,
    resolved_view,
    resolving_view,
    with_phase,
)

logger = logging.getLogger(__name__)

PHASE = "prefill"
# Tokens of the shortest graph, for what is left of a prompt that the prefix cache holds: a replay pads to twice as
# many at most, and SGLang's shortest one has four.
SHORTEST = 2
UNTESTED = "enable_lora", "enable_mixed_chunk", "enable_hierarchical_cache", "enable_deterministic_inference"


def settle_prefill_graphs(server_args: Any) -> None:
    """Before SGLang resolves the speculative arguments of a launch of this package's worker: asks for what flags
    leave open of the graphs of prefills. The log says what, and why not whole forwards."""
    cfg = resolving_view(server_args)
    if not cfg.device.startswith("cuda"):
        return
    graphs, locked = cfg.cuda_graph_config, server_args._cuda_graph_config_locked
    if graphs.prefill.backend != CudaGraphBackend.BREAKABLE:
        return
    changes: dict[str, Any] = {}
    sizes = graphs.prefill.bs
    if sizes and list(sizes) == generate_prefill_cuda_graph_batch_sizes(max(sizes)):  # nobody else's
        changes["bs"] = [SHORTEST, *sizes]
    if (PHASE, "backend") not in locked:
        reason = why_in_parts(cfg, attention_backends_of(resolved_view(server_args)), model_config_of(server_args))
        if reason is None:
            changes["backend"] = CudaGraphBackend.FULL
        logger.info(
            "dflash_sglang prefill graphs: %s; --cuda-graph-backend-prefill chooses",
            "of the whole forward" if reason is None else f"as SGLang has them, because {reason}",
        )
    if changes:
        declare_resolution(server_args, "dflash_sglang", cuda_graph_config=with_phase(graphs, PHASE, **changes))


def why_in_parts(cfg: Any, attention: tuple[str | None, str | None], target: Any) -> str | None:
    """Why attention is better left out of the graphs of prefills, or None.

    cfg: the launch's; attention: backends of prefill and decode; target: SGLang's ModelConfig of it."""
    if attention[0] != "fa3":
        return f"attention is {attention[0]}'s, and whole forwards are tested with fa3"
    if max(cfg.tp_size, cfg.pp_size) > 1:
        return "no test has whole forwards on several ranks"
    if target.attention_arch != AttentionArch.MHA or mambaish_config(target) is not None:
        return "the target has layers without keys and values for each head"
    if target.is_hybrid_swa or target.sliding_window_size is not None:
        return "the target has sliding windows"
    if target.is_multimodal:
        return "prompts may hold more than text"
    for flag in UNTESTED:
        if getattr(cfg, flag):
            return f"no test has whole forwards with --{flag.replace('_', '-')}"
    if cfg.disaggregation_mode != "null":
        return "no test has whole forwards on a prefill server"
    return None
