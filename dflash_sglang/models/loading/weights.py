"""Strict loading of a draft checkpoint: every tensor has a place, every place gets its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING, NOT_LOADED
from dflash_sglang.checkpoint.shapes import KV_SCALES, RECOMPUTED
from dflash_sglang.models.loading.checkpoint_form import CheckpointForm, never_read, quantised_layers
from dflash_sglang.models.loading.nvfp4 import dense_tables
from dflash_sglang.models.loading.stacking import Shard, load_shard, stacked, still_missing
from dflash_sglang.sglang_names.scheduler import (
    ModelOptFp4LinearMethod,
    ModelOptNvFp4A16LinearMethod,
    maybe_remap_kv_scale_name,
)
from dflash_sglang.startup.facts import LoadError

_ORDER = (
    "activation order",
    "one kernel reads their inputs",
    "Quantise without an activation order (desc_act false, actorder null or 'static').",
)
_SCALE = (
    "scale",
    "one kernel reads them as one matrix",
    "Quantise q, k and v with one scale, and gate and up with one, as ModelOpt exports them.",
)
_ONE_OF_A_STACK = {"g_idx": _ORDER, "weight_g_idx": _ORDER, "weight_scale_2": _SCALE}
"""By suffix what all the modules that are stacked have alike: the order in which the stack's inputs are read, and
NVFP4's scale of a whole matrix. With it why, and what to do where they differ."""

_PACKED = (torch.uint8, torch.int32, torch.int64)
"""Dtypes that hold several weights in a number, in a shape that the quantisation decides."""

_NAMED = 8  # of the tensors that an error is about: those of a whole target are many


class Placed(NamedTuple):
    """A tensor of a checkpoint and where it goes: into a shard of a parameter, None for the whole of it."""

    name: str
    tensor: Tensor
    target: str
    shard: Shard


Shapes = Mapping[str, tuple[int, ...]]
"""By checkpoint name, of whole tensors that are not packed."""


def load_checkpoint(model: nn.Module, shapes: Shapes, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Loads a whole checkpoint by its tensors' names, with or without the prefix `model.`.

    Tensors of a quantisation method (scales, zero points, packed weights, g_idx) go to its parameters like
    any other. Raises ValueError naming each missing or unexpected tensor, or the one whose shape does not fit.
    """
    params = dict(model.named_parameters())
    unexpected: list[str] = []
    loaded: dict[str, set[Shard]] = {}
    for placed in _places(shapes, params, dense_tables(weights), unexpected):
        _load(params, placed)
        loaded.setdefault(placed.target, set()).add(placed.shard)
    if unexpected:
        raise LoadError(
            f"draft checkpoint: unexpected tensors {listed(unexpected)}. Expected only those of the "
            "draft that its config.json describes. "
            "Remove them, or correct config.json (layers, biases, quantization_config). A head, an embedding or a "
            "mask row of the draft's own is found in *.safetensors files alone: convert a checkpoint of others."
        )
    _refuse_biases(quantised_layers(model))
    needed = params.keys() - never_read(dict(model.named_modules()))
    missing = [name for target in needed for name in still_missing(target, loaded.get(target, set()))]
    if missing:
        raise LoadError(
            f"draft checkpoint: missing tensors {sorted(missing)}. Expected every tensor that its "
            "config.json describes. Use a complete checkpoint, or correct config.json (layers, biases, "
            "quantization_config)."
        )


def load_update(model: nn.Module, shapes: Shapes, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Loads any part of a checkpoint into a loaded model, of a quantised module all of it.

    Raises ValueError as `load_checkpoint`, and for a part of a quantised module, before anything is changed; a
    tensor that belongs to a quantisation alone is judged by its loader, and the module is as it was.
    """
    weights, served = list(dense_tables(weights)), dict(model.named_parameters())
    targets = {_place(name.removeprefix("model."), served)[0] for name, _ in weights}
    touched = {target.rpartition(".")[0] for target in targets if not target.endswith(".bias")}
    quantised = {name: layer for name, layer in quantised_layers(model).items() if name in touched}
    with CheckpointForm(quantised) as form:
        params = dict(model.named_parameters())
        unexpected: list[str] = []
        update = list(_places(shapes, params, weights, unexpected))
        if unexpected:
            raise ValueError(unexpected_in_update(unexpected))
        shards: dict[str, set[Shard]] = {}
        for placed in update:
            shards.setdefault(placed.target, set()).add(placed.shard)
        form.require_whole_modules(shards)
        for placed in update:
            _load(params, placed)


def _refuse_biases(layers: Mapping[str, nn.Module]) -> None:
    nvfp4 = (ModelOptFp4LinearMethod, ModelOptNvFp4A16LinearMethod)
    biased = [
        name
        for name, layer in layers.items()
        if isinstance(layer.quant_method, nvfp4) and getattr(layer, "bias", None) is not None
    ]
    if biased:
        raise LoadError(
            f"draft checkpoint: biases of {listed(biased)}, which are in NVFP4. Expected none there: SGLang's "
            "Marlin kernel adds them in another order. Quantise the draft without these modules (exclude_modules)."
        )


def of_others(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The names that are, as they stand, neither of a parameter of the draft nor of one of its modules."""
    parameters = dict(model.named_parameters()).keys()
    modules = {f"{name}." for name, _ in model.named_modules() if name}
    own = ((name, stacked(name)[0]) for name in names)
    return [name for name, to in own if to not in parameters and to[: to.rfind(".") + 1] not in modules]


def _places(
    shapes: Shapes,
    params: Mapping[str, nn.Parameter],
    weights: Iterable[tuple[str, Tensor]],
    unexpected: list[str],
) -> Iterator[Placed]:
    """The place of each tensor that has one, as they come; `unexpected` gets the names of the others. Raises
    ValueError for one that does not fit its place."""
    shared: dict[str, Tensor] = {}
    for name, tensor in weights:
        own = name.removeprefix("model.")
        if name.endswith(RECOMPUTED) or own in NOT_LOADED:
            continue
        target, shard = _place(own, params)
        if target not in params:
            unexpected.append(name)
            continue
        one = _ONE_OF_A_STACK.get(target.rpartition(".")[2])
        if one is not None and not torch.equal(shared.setdefault(target, tensor), tensor):
            what, why, fix = one
            raise LoadError(
                f"draft checkpoint: tensor {name!r} is another {what} than that of the modules stacked with it in "
                f"{target!r}. Expected one {what} for all of them, because {why}. {fix}"
            )
        if target == MASK_EMBEDDING:
            tensor = tensor.squeeze()
        expected = shapes.get(own, tuple(tensor.shape))
        if tensor.dtype not in _PACKED and tensor.numel() > 1 and tensor.shape != expected:
            raise LoadError(
                f"draft checkpoint: tensor {name!r} of shape {tuple(tensor.shape)} and {tensor.dtype}: expected "
                f"shape {expected}, which config.json describes. Make the checkpoint and its config.json agree."
            )
        yield Placed(name, tensor, target, shard)


def unexpected_in_update(names: Collection[str]) -> str:
    return (
        f"weight update of the draft: unexpected tensors {listed(names)}. Expected only those of the "
        "draft's checkpoint. Send tensors of the target with selector='target', and the draft's with "
        "selector='draft'. The draft keeps its weights."
    )


def listed(names: Collection[str]) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{sorted(names)[:_NAMED]}{more}"


def _place(name: str, params: Mapping[str, nn.Parameter]) -> tuple[str, Shard]:
    """(parameter, shard) that a checkpoint tensor belongs to; the parameter may not exist."""
    if name in params:
        return name, None
    if name.endswith(KV_SCALES):
        return maybe_remap_kv_scale_name(name, dict(params)) or name, None
    return stacked(name)


def _load(params: Mapping[str, nn.Parameter], placed: Placed) -> None:
    load_shard(params[placed.target], placed.name, placed.tensor, placed.shard, "draft checkpoint")
