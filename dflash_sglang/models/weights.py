"""Strict loading of a draft checkpoint: every tensor has a place, every place gets its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from dflash_sglang.compat import maybe_remap_kv_scale_name
from dflash_sglang.own_modules import MASK_EMBEDDING, TRAINING_TENSORS, VOCABULARY_TENSORS

Shard = str | int | None

STACKED: Mapping[str, tuple[str, Shard]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Checkpoint module -> (module that stacks it, its shard there)."""

_RECOMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Rotary tables that some exporters save; RoPE is computed from the config."""

_KV_CACHE_SCALES = (".attn.k_scale", ".attn.v_scale")
"""Scales of a quantised KV cache, which SGLang defaults to 1 where the checkpoint has none."""

_ELSEWHERE = VOCABULARY_TENSORS + TRAINING_TENSORS
"""Tensors of the speculators format that are read when the model is built, or belong to training."""

_ACTIVATION_ORDERS = (".g_idx", ".weight_g_idx")
"""One for all the modules that are stacked: the order in which the stack's inputs are read."""


def load_draft_weights(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], complete: bool
) -> dict[str, set[Shard]]:
    """Loads `weights` by their checkpoint names, with or without the prefix `model.`.

    Tensors of a quantisation method (scales, zero points, packed weights, g_idx) go to its parameters like
    any other. `complete`: also require every parameter to get all of its shards (False for a weight update,
    which may bring a part). Raises ValueError naming each missing or unexpected tensor, or the one whose
    shape does not fit. Returns what was loaded: the shards by parameter.
    """
    params = dict(model.named_parameters())
    loaded: dict[str, set[Shard]] = {}
    unexpected: list[str] = []
    orders: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name.endswith(_RECOMPUTED) or name.removeprefix("model.") in _ELSEWHERE:
            continue
        target, shard = _place(name.removeprefix("model."), params)
        if target not in params:
            unexpected.append(name)
            continue
        if target.endswith(_ACTIVATION_ORDERS) and not torch.equal(orders.setdefault(target, tensor), tensor):
            raise _other_order(name, target)
        _load(params[target], tensor.squeeze() if target == MASK_EMBEDDING else tensor, shard, name)
        loaded.setdefault(target, set()).add(shard)
    if unexpected:
        raise ValueError(
            f"draft checkpoint: unexpected tensors {sorted(unexpected)}. Expected only those of the "
            "draft that its config.json describes. "
            "Remove them, or correct config.json (layers, biases, quantization_config)."
        )
    missing = [name for target in params for name in still_missing(target, loaded.get(target, set()))]
    if complete and missing:
        raise ValueError(
            f"draft checkpoint: missing tensors {sorted(missing)}. Expected every tensor that its "
            "config.json describes. Use a complete checkpoint, or correct config.json (layers, biases, "
            "quantization_config)."
        )
    return loaded


def _other_order(name: str, target: str) -> ValueError:
    return ValueError(
        f"draft checkpoint: tensor {name!r} is another activation order than that of the modules stacked with it "
        f"in {target!r}. Expected one order for all of them, because one kernel reads their inputs. Quantise "
        "without an activation order (desc_act false, actorder null or 'static')."
    )


def _place(name: str, params: Mapping[str, nn.Parameter]) -> tuple[str, Shard]:
    """(parameter, shard) that a checkpoint tensor belongs to; the parameter may not exist."""
    if name in params:
        return name, None
    if name.endswith((".k_scale", ".v_scale", ".kv_scale", ".output_scale")):
        return maybe_remap_kv_scale_name(name, dict(params)) or name, None
    for module, (stack, shard) in STACKED.items():
        if f".{module}." in name:
            return name.replace(f".{module}.", f".{stack}."), shard
    return name, None


def _load(param: nn.Parameter, tensor: Tensor, shard: Shard, name: str) -> None:
    loader = getattr(param, "weight_loader", default_weight_loader)
    try:
        if shard is None:
            loader(param, tensor)
        else:
            loader(param, tensor, shard)
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        raise ValueError(
            f"draft checkpoint: tensor {name!r} of shape {tuple(tensor.shape)} and {tensor.dtype} does not "
            f"fit its parameter of shape {tuple(param.shape)} and {param.dtype} on this rank ({error}). "
            "Make the checkpoint and its config.json agree."
        ) from error


def still_missing(target: str, shards: set[Shard]) -> list[str]:
    """Checkpoint names that `target` still needs, given the shards it got (None: the whole parameter)."""
    if None in shards or target.endswith(_KV_CACHE_SCALES) or target == MASK_EMBEDDING:
        return []
    for stack in ("qkv_proj", "gate_up_proj"):
        if f".{stack}." in target:
            return [
                target.replace(stack, module)
                for module, (owner, shard) in STACKED.items()
                if owner == stack and shard not in shards
            ]
    return [target]
