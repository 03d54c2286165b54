"""K and V rows of quantised qkv_proj layers, repacked so that the layers' own kernels compute nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dflash_sglang.models.layers import DraftAttention


@dataclass(frozen=True)
class Packing:
    """How a quantisation scheme keeps a linear layer once SGLang has processed its weights.

    ``tensors``: those with entries per output row, each along one dimension (its second one, or the first of a
    column), in proportion to the rows; absent or empty ones are passed on. ``granule``: output rows that a piece
    of them begins and ends at. ``shared``: what the kernel reads besides, the same for all rows.
    ``per_layer``: the shared ones of those that, where they hold values, belong to one layer only.
    ``sized(view, rows)``: makes a view of the layer say that it has `rows` output rows.
    """

    tensors: tuple[str, ...]
    granule: int
    shared: tuple[str, ...] = ()
    per_layer: tuple[str, ...] = ()
    fuses_bias: bool = True
    sized: Callable[[SimpleNamespace, int], None] | None = None


def _size_attribute(view: SimpleNamespace, rows: int) -> None:
    view.output_size_per_partition = rows


def _size_scheme(view: SimpleNamespace, rows: int) -> None:
    view.scheme = _sized_kernel(view.scheme, rows)


def _size_kernel_of_scheme(view: SimpleNamespace, rows: int) -> None:
    view.scheme = copy.copy(view.scheme)
    view.scheme.kernel = _sized_kernel(view.scheme.kernel, rows)


def _sized_kernel(kernel: Any, rows: int) -> Any:
    """A copy of a Marlin scheme or kernel whose config counts `rows` output rows; it keeps the workspace."""
    sized, config = copy.copy(kernel), kernel.kernel_config
    sized.kernel_config = replace(
        config,
        full_weight_shape=(config.full_weight_shape[0], rows),
        partition_weight_shape=(config.partition_weight_shape[0], rows),
    )
    return sized


# Rows of the CUTLASS kernels' weights lie 16 bytes apart; Marlin's tiles are 64 output rows wide, and its
# permutations of scales and zero points stay inside of them.
_FP8 = Packing(("weight", "weight_scale"), 16, ("input_scale",), per_layer=("input_scale",))
_INT8 = Packing(("weight", "weight_scale"), 16)
_MARLIN_WNA16 = Packing(
    ("weight_packed", "weight_scale", "weight_zero_point"),
    64,
    ("weight_g_idx", "g_idx_sort_indices"),
    per_layer=("weight_g_idx", "g_idx_sort_indices"),
    fuses_bias=False,
    sized=_size_scheme,
)
_MARLIN_GPTQ = Packing(
    ("qweight", "scales", "qzeros"),
    64,
    ("g_idx", "g_idx_sort_indices"),
    per_layer=("g_idx", "g_idx_sort_indices"),
    fuses_bias=False,
    sized=_size_kernel_of_scheme,
)
_MARLIN_AWQ = Packing(
    ("qweight", "scales", "qzeros"),
    64,
    ("g_idx", "g_idx_sort_indices", "workspace", "input_size_per_partition"),
    fuses_bias=False,
    sized=_size_attribute,
)
_AWQ = Packing(("qweight", "scales", "qzeros"), 8, fuses_bias=False)
# Output rows that are a multiple of 128 are never padded.
_MARLIN_NVFP4 = Packing(
    ("weight", "weight_scale"),
    128,
    ("weight_global_scale", "workspace", "input_size_per_partition"),
    per_layer=("weight_global_scale",),
    sized=_size_attribute,
)

_PACKINGS = {
    "Fp8LinearMethod": _FP8,
    "W8A8Int8LinearMethod": _INT8,
    "CompressedTensorsW8A8Fp8": _FP8,
    "CompressedTensorsW8A8Int8": _INT8,
    "CompressedTensorsWNA16": _MARLIN_WNA16,
    "GPTQMarlinLinearScheme": _MARLIN_GPTQ,
    "AWQMarlinLinearScheme": _MARLIN_AWQ,
    "AWQLinearScheme": _AWQ,
    "ModelOptNvFp4A16LinearMethod": _MARLIN_NVFP4,
}
"""By the name of the layer's scheme or, without one, of its method."""


class QuantisedKV:
    """K and V of all layers through their quantisation method, without Q.

    The layers read the same rows: where nothing but output rows tells them apart, their K and V rows become one
    layer of the method's, one quantisation of the activations and one GEMM. Layers with an activation scale or
    an activation order of their own keep a GEMM each. The repack copies K and V: ``bytes`` of memory.
    """

    def __init__(self, attentions: Sequence[DraftAttention]) -> None:
        """attentions: layers of which `not_sliceable` says nothing."""
        self._attentions = list(attentions)
        self.obstacle_to_joining = _not_joinable(attentions)
        groups = [self._attentions] if self.obstacle_to_joining is None else [[a] for a in self._attentions]
        self._parts = [_Part(group) for group in groups]
        self.method = scheme_name(self._attentions[0].qkv_proj)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self._parts)

    def refresh(self) -> None:
        for part in self._parts:
            part.refresh()

    def project(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """As `Projection.project`; joined layers never into `out`, but into a tensor of the method's own."""
        shape = (rows.shape[0], len(self._attentions), 2 * self._attentions[0].kv_size)
        if len(self._parts) == 1:
            return self._parts[0].project(rows).view(shape)
        kv = rows.new_empty(shape) if out is None else out
        for layer, part in enumerate(self._parts):
            part.project(rows, out=kv[:, layer])
        return kv


class _Part:
    """K and V rows of some layers as one layer of their method's."""

    def __init__(self, attentions: Sequence[DraftAttention]) -> None:
        self._attentions = attentions
        first: Any = attentions[0].qkv_proj
        self._method, self._packing = first.quant_method, _PACKINGS[scheme_name(first)]
        shared = {name: getattr(first, name, None) for name in self._packing.shared}
        self._view = SimpleNamespace(scheme=first.scheme, **shared)
        if self._packing.sized is not None:
            self._packing.sized(self._view, len(attentions) * 2 * attentions[0].kv_size)
        self._tensors = self._joined()
        vars(self._view).update(self._tensors)
        self._bias = self._joined_bias()

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._tensors.values() if t is not None)

    def refresh(self) -> None:
        for name, value in self._joined().items():
            if value is not None:
                self._tensors[name].copy_(value)
        for name in self._packing.per_layer:
            setattr(self._view, name, getattr(self._attentions[0].qkv_proj, name, None))
        if self._bias is not None:
            self._bias.copy_(self._joined_bias())

    def project(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """rows [T, hidden] -> [T, these layers' K and V], in `out` where given."""
        fused = self._bias if self._packing.fuses_bias else None
        kv = self._method.apply(self._view, rows, fused)
        bias = None if self._packing.fuses_bias else self._bias
        if bias is not None:
            return torch.add(kv, bias, out=kv if out is None else out)
        return kv if out is None else out.copy_(kv)

    def _joined(self) -> dict[str, Any]:
        """Every tensor of the packing, K and V rows of these layers one after the other."""
        one_layer = len(self._attentions) == 1
        joined = {}
        for name in self._packing.tensors:
            whole: list[Any] = [getattr(a.qkv_proj, name, None) for a in self._attentions]
            if whole[0] is None or whole[0].numel() == 0 or (one_layer and whole[0].numel() == 1):
                joined[name] = whole[0]  # absent, or one scale for the whole layer
                continue
            pieces = [_kv_rows(a, t.data) for a, t in zip(self._attentions, whole, strict=True)]
            joined[name] = _concatenated(pieces, _row_dimension(pieces[0]))
        return joined

    def _joined_bias(self) -> Tensor | None:
        if self._attentions[0].qkv_proj.bias is None:
            return None
        return torch.cat([a.qkv_proj.bias.data[a.q_size :] for a in self._attentions])


def scheme_name(layer: nn.Module) -> str:
    """Name of the class that serves a linear layer: its scheme's or, without one, its method's."""
    scheme = getattr(layer, "scheme", None)
    return type(layer.quant_method if scheme is None else scheme).__name__


def not_sliceable(attentions: Sequence[DraftAttention]) -> str | None:
    """Why K and V rows cannot be taken out of the layers' packed weights, or None."""
    for index, attention in enumerate(attentions):
        layer: Any = attention.qkv_proj
        name, served = scheme_name(layer), f"layers.{index}.self_attn.qkv_proj is served by {scheme_name(layer)}"
        packing = _PACKINGS.get(name)
        if packing is None:
            return served
        owner = layer.quant_method if layer.scheme is None else layer.scheme
        for form in ("use_marlin", "block_quant", "use_mxfp8", "weight_block_size"):
            if getattr(owner, form, None):
                return f"{served} with {form}"
        if attention.q_size % packing.granule or 2 * attention.kv_size % packing.granule:
            return f"{served}, whose rows come in {packing.granule}s: q {attention.q_size}, kv {attention.kv_size}"
    return None


def _not_joinable(attentions: Sequence[DraftAttention]) -> str | None:
    """Why sliceable layers keep a GEMM each, or None."""
    first = attentions[0].qkv_proj
    for index, attention in enumerate(attentions):
        layer = attention.qkv_proj
        if scheme_name(layer) != scheme_name(first) or _layout(layer) != _layout(first):
            return f"layers.{index} is quantised in another way than layers.0"
        for name in _PACKINGS[scheme_name(layer)].per_layer:
            own = getattr(layer, name, None)
            if own is not None and own.numel():
                return f"each layer has {name} of its own"
    return None


def _layout(layer: Any) -> list[tuple[torch.Size, torch.dtype] | None]:
    values = (getattr(layer, name, None) for name in _PACKINGS[scheme_name(layer)].tensors)
    return [None if value is None else (value.shape, value.dtype) for value in values]


def _kv_rows(attention: DraftAttention, tensor: Tensor) -> Tensor:
    """The part of a tensor of qkv_proj that belongs to its K and V rows; one scale counts for all rows."""
    kv_rows, all_rows = 2 * attention.kv_size, attention.q_size + 2 * attention.kv_size
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(kv_rows, 1)
    dimension = _row_dimension(tensor)
    size = tensor.shape[dimension]
    start = attention.q_size * size // all_rows
    return tensor.narrow(dimension, start, size - start)


def _row_dimension(tensor: Tensor) -> int:
    return 0 if tensor.shape[1] == 1 else 1


def _concatenated(pieces: Sequence[Tensor], dimension: int) -> Tensor:
    """The pieces in memory of their own, in columns where they lie in columns."""
    if pieces[0].stride(0) == 1 and pieces[0].shape[1] > 1:
        return torch.cat([piece.t() for piece in pieces], 1 - dimension).contiguous().t()
    return torch.cat(list(pieces), dimension).contiguous()
