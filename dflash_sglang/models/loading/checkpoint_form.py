"""Quantised layers of a draft in their checkpoint's layout, while new weights are loaded into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dflash_sglang.models.loading.stacking import Shard, still_missing
from dflash_sglang.sglang_names.scheduler import (
    WEIGHT_LOADER_V2_SUPPORTED,
    LinearBase,
    ModelOptNvFp4A16LinearMethod,
    UnquantizedLinearMethod,
)


class CheckpointForm:
    """While its block runs, quantised layers have fresh parameters to load into, of their checkpoint's layout.

    SGLang processes quantised weights into other shapes once, after loading, and cannot load into those. Here a
    layer's served tensors are put aside, and its method makes new ones. At the end of the block they are processed
    and the outcome is copied into the served tensors, whose addresses graphs have captured. An error leaves the
    layers as they were. Nothing may be computed by them meanwhile.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        """layers: by name, those that tensors are about to be loaded into."""
        self._served = {name: _Served(layer) for name, layer in layers.items()}

    def __enter__(self) -> CheckpointForm:
        for served in self._served.values():
            served.open()
        return self

    def require_whole_modules(self, update: Mapping[str, set[Shard]]) -> None:
        """update: shards by parameter. Raises ValueError where it brings a part of a quantised module."""
        for name, served in self._served.items():
            parameters = {f"{name}.{own}" for own in served.parameters()} - never_read({name: served.layer})
            missing = [m for p in parameters for m in still_missing(p, update.get(p, set()))]
            if missing:
                raise ValueError(
                    f"weight update of a quantised draft: missing tensors {sorted(missing)}. Expected every "
                    f"tensor of {name} in one request, in the checkpoint's layout. Send them together, or serve a "
                    "dense checkpoint with --speculative-draft-model-quantization unquant."
                )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for served in self._served.values():
            served.close(loaded=kind is None)


class _Served:
    """One layer's served tensors and the state of its kernel."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._tensors = self._own_tensors()
        scheme = layer.scheme
        self._states = [(owner, dict(vars(owner))) for owner in (scheme, getattr(scheme, "kernel", None)) if owner]

    def parameters(self) -> list[str]:
        return [name for name, _ in self.layer.named_parameters(recurse=False) if name != "bias"]

    def open(self) -> None:
        layer = self.layer
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
            self.layer.quant_method.process_weights_after_loading(self.layer)
            new = self._own_tensors()
        self._drop()
        for owner, state in self._states:
            vars(owner).clear()
            vars(owner).update(state)
        for name, tensor in self._tensors.items():
            if name in new and tensor.numel():
                tensor.data.copy_(new[name])
            if isinstance(tensor, nn.Parameter):
                self.layer.register_parameter(name, tensor)
            else:
                setattr(self.layer, name, tensor)

    def _own_tensors(self) -> dict[str, Tensor]:
        """Parameters and tensor attributes by name, without the bias."""
        layer = self.layer
        named = {**layer._parameters, **{n: v for n, v in vars(layer).items() if isinstance(v, Tensor)}}
        return {name: value for name, value in named.items() if value is not None and name != "bias"}

    def _drop(self) -> None:
        for name in self._own_tensors():
            delattr(self.layer, name)

    def _device(self) -> torch.device:
        return next(iter(self._tensors.values())).device


def quantised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a draft by name whose weights are quantised."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, LinearBase) and type(layer.quant_method) is not UnquantizedLinearMethod
    }


def never_read(modules: Mapping[str, nn.Module]) -> set[str]:
    """Parameters of these modules, by name, that no kernel reads: checkpoints may lack them."""
    return {
        f"{name}.input_scale"
        for name, module in modules.items()
        if isinstance(getattr(module, "quant_method", None), ModelOptNvFp4A16LinearMethod)
    }
