"""Attention backends that verify trees: those of the CPU platform and of FlashAttention 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_sglang.kernels.attention.tree_keys import HEAD_DIMS
from dflash_sglang.kernels.block.grow_tree import Tree
from dflash_sglang.patches import flash3
from dflash_sglang.sglang_names.scheduler import (
    IdSpaceKind,
    MHATokenToKVPool,
    ModelRunner,
    RadixAttention,
    mambaish_config,
)


def serve_trees(backend: Any, tree: Tree) -> None:
    """From here on, this backend's verify forwards attend as trees. Call it before its graphs are captured.

    Request i of a forward is row i of `tree`: buffers of [most requests, nodes] that keep their place. The batch's
    `seq_lens` are the prefixes. Node j has the slot of position prefix + j, and `out_cache_loc` [bs * nodes] names
    it. A node sees its prefix, its ancestors and itself.

    backend: one for blocks of `nodes` rows, changed by `spare_launches`, of a target without a `why_no_trees`.
    """
    own = getattr(backend, "serve_trees", None)
    if own is not None:
        own(tree)
    else:
        flash3.serve_trees(backend, tree)


def why_no_trees(target: ModelRunner) -> str | None:
    """Why verify forwards of this target have no trees, as a clause for the log; None if they can.

    Call it once the target's backends and pools exist.
    """
    return next(_obstacles(target), None)


def _obstacles(target: ModelRunner) -> Iterator[str]:
    backend, pool, space = target.attn_backend, target.token_to_kv_pool, target.kv_index_translator.space
    if mambaish_config(target.model_config) is not None:
        yield "the target's recurrent layers verify chains"
    if space(IdSpaceKind.FULL).write is not None or space(IdSpaceKind.SLIDING_WINDOW) is not None:
        yield f"{type(pool).__name__} has names of its own for slots, and accepted rows are moved by slot"
    if hasattr(backend, "serve_trees"):
        return
    if getattr(backend, "use_mla", False):
        yield "the target's attention is over latent rows, and trees need keys and values of heads"
    if not flash3.shares_schedules(backend):
        yield f"{type(backend).__name__} verifies chains; trees need --attention-backend fa3 without DP attention"
    for layer in (module for module in target.model.modules() if isinstance(module, RadixAttention)):
        yield from _obstacles_of(layer)
    if sinks := [name for name, _ in target.model.named_parameters() if "sink" in name]:
        yield f"attention has sinks ({sinks[0]})"
    if not isinstance(pool, MHATokenToKVPool) or pool.use_hnd:
        yield f"trees do not read {type(pool).__name__} in this layout"
    elif pool.store_dtype != target.dtype:
        yield f"the KV pool holds {pool.store_dtype}, and trees need the model's {target.dtype}"


def _obstacles_of(layer: RadixAttention) -> Iterator[str]:
    name = f"attention layer {layer.layer_id}"
    if layer.sliding_window_size >= 0 or layer.use_irope:
        yield f"{name} sees a part of the context"
    if layer.is_cross_attention:
        yield f"{name} is cross attention"
    if layer.logit_cap:
        yield f"{name} caps its logits at {layer.logit_cap:g}"
    if layer.head_dim not in HEAD_DIMS or layer.v_head_dim != layer.head_dim:
        dims = ", ".join(map(str, HEAD_DIMS))
        yield f"{name} has keys of {layer.head_dim}, values of {layer.v_head_dim}; trees need {dims} of both"
