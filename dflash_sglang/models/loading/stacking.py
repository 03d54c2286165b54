"""The modules of a checkpoint that the model stacks into one: their places, their loading, and what is missing."""

from __future__ import annotations

from collections.abc import Set

from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING
from dflash_sglang.checkpoint.shapes import STACKED
from dflash_sglang.startup.facts import LoadError

Shard = str | int | None
_KV_CACHE_SCALES = (".attn.k_scale", ".attn.v_scale")
"""Scales of a quantised KV cache, which SGLang defaults to 1 where the checkpoint has none."""


def stacked(name: str) -> tuple[str, Shard]:
    """(parameter, shard) of the model for a checkpoint's tensor; None: the whole of it."""
    for module, (stack, shard) in STACKED.items():
        if f".{module}." in name:
            return name.replace(f".{module}.", f".{stack}."), shard
    return name, None


def still_missing(target: str, shards: Set[Shard]) -> list[str]:
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


def load_shard(param: nn.Parameter, name: str, tensor: Tensor, shard: Shard, whose: str) -> None:
    """Load a checkpoint's tensor by the parameter's own loader. Raises LoadError, of `whose` tensors, for one that
    does not fit."""
    loader = getattr(param, "weight_loader", default_weight_loader)
    try:
        loader(param, tensor, *(() if shard is None else (shard,)))
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        raise LoadError(
            f"{whose}: tensor {name!r} of shape {tuple(tensor.shape)} and {tensor.dtype} does not "
            f"fit its parameter of shape {tuple(param.shape)} and {param.dtype} on this rank ({error}). "
            "Make the checkpoint and its config.json agree."
        ) from error
