"""The modules of a checkpoint that the model stacks into one, and what is missing of such a stack."""

from __future__ import annotations

from collections.abc import Mapping, Set

from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING

Shard = str | int | None

STACKED: Mapping[str, tuple[str, Shard]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Checkpoint module -> (module that stacks it, its shard there)."""

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
