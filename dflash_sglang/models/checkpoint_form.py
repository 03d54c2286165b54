"""Quantised layers of a draft in their checkpoint's layout, while an update brings them new weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_sglang.compat import WEIGHT_LOADER_V2_SUPPORTED, LinearBase, UnquantizedLinearMethod
from dflash_sglang.models.weights import Shard, still_missing

if TYPE_CHECKING:
    from dflash_sglang.models.draft import DFlashDraftModel


class CheckpointForm:
    """Open from construction to `close`: every quantised linear layer has fresh parameters to load into.

    SGLang processes quantised weights into other shapes once, after loading, and cannot load into those. Here a
    layer's served tensors are put aside, and its method makes new ones. `close` processes the layers that were
    loaded and copies the outcome into the served tensors, whose addresses graphs have captured; the other
    layers get theirs back as they were.
    """

    def __init__(self, model: DFlashDraftModel) -> None:
        self._model = model
        self._loaded: set[str] = set()
        self._served = {name: _Served(layer) for name, layer in quantised_layers(model).items()}
        for served in self._served.values():
            served.open()
        model.open_form = self

    @property
    def quantised(self) -> bool:
        """Whether the draft has quantised linear layers at all."""
        return bool(self._served)

    def require_whole_modules(self, update: Mapping[str, set[Shard]]) -> None:
        """update: shards by parameter. Raises ValueError where it brings a part of a quantised module."""
        for name, parameters in self._touched(update):
            missing = [m for p in parameters for m in still_missing(p, update.get(p, set()))]
            if missing:
                raise ValueError(
                    f"weight update of a quantised draft: missing tensors {sorted(missing)}. Expected every "
                    f"tensor of {name} in one request, in the checkpoint's layout. Send them together, or serve a "
                    "dense checkpoint with --speculative-draft-model-quantization unquant."
                )

    def note(self, update: Mapping[str, set[Shard]]) -> None:
        """After the load of an update."""
        self._loaded.update(name for name, _ in self._touched(update))

    def _touched(self, update: Mapping[str, set[Shard]]) -> Iterator[tuple[str, list[str]]]:
        """The quantised modules that an update brings tensors of, and their parameters."""
        for name, served in self._served.items():
            parameters = [f"{name}.{own}" for own in served.parameters()]
            if any(parameter in update for parameter in parameters):
                yield name, parameters

    def close(self) -> None:
        self._model.open_form = None
        for name, served in self._served.items():
            served.close(name in self._loaded)


class _Served:
    """One layer's served tensors and the state of its kernel."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._tensors = self._own_tensors()
        scheme = layer.scheme
        self._states = [(owner, dict(vars(owner))) for owner in (scheme, getattr(scheme, "kernel", None)) if owner]

    def parameters(self) -> list[str]:
        return [name for name, _ in self._layer.named_parameters(recurse=False) if name != "bias"]

    def open(self) -> None:
        layer = self._layer
        self._drop()
        v2 = type(layer.quant_method).__name__ in WEIGHT_LOADER_V2_SUPPORTED or (
            layer.scheme is not None and layer.scheme.requires_weight_loader_v2
        )
        loader = layer.weight_loader_v2 if v2 and hasattr(layer, "weight_loader_v2") else layer.weight_loader
        with torch.device(self._device()):
            layer.quant_method.create_weights(
                layer,
                input_size_per_partition=getattr(layer, "input_size_per_partition", layer.input_size),
                output_partition_sizes=getattr(layer, "output_partition_sizes", [layer.output_size]),
                input_size=layer.input_size,
                output_size=layer.output_size,
                params_dtype=layer.params_dtype,
                weight_loader=loader,
            )

    def close(self, loaded: bool) -> None:
        new: dict[str, Tensor] = {}
        if loaded:
            self._layer.quant_method.process_weights_after_loading(self._layer)
            new = self._own_tensors()
        self._drop()
        for owner, state in self._states:
            vars(owner).clear()
            vars(owner).update(state)
        for name, tensor in self._tensors.items():
            if name in new and tensor.numel():
                tensor.data.copy_(new[name])
            if isinstance(tensor, nn.Parameter):
                self._layer.register_parameter(name, tensor)
            else:
                setattr(self._layer, name, tensor)

    def _own_tensors(self) -> dict[str, Tensor]:
        """Parameters and tensor attributes by name, without the bias."""
        layer = self._layer
        named = {**layer._parameters, **{n: v for n, v in vars(layer).items() if isinstance(v, Tensor)}}
        return {name: value for name, value in named.items() if value is not None and name != "bias"}

    def _drop(self) -> None:
        for name in self._own_tensors():
            delattr(self._layer, name)

    def _device(self) -> torch.device:
        return next(iter(self._tensors.values())).device


def quantised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a draft by name whose weights are quantised."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase) and type(layer.quant_method) is not UnquantizedLinearMethod
    }
