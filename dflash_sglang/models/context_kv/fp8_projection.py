"""K and V rows of fp8 qkv_proj layers, repacked so that the layers' own kernel computes nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dflash_sglang.models.context_kv.base import Projection
from dflash_sglang.models.layers import DraftAttention

_SERVED = ("Fp8LinearMethod", "CompressedTensorsW8A8Fp8")
_PER_ROW = ("weight", "weight_scale")  # tensors with entries per output row, along one dimension
_GRANULE = 16  # rows of the CUTLASS kernels' weights lie 16 bytes apart


class Fp8KV(Projection):
    """K and V of all layers through their fp8 method, without Q.

    The layers read the same rows: where nothing but output rows tells them apart, their K and V rows become one
    layer of the method's, one quantisation of the activations and one GEMM. Layers with an activation scale of
    their own keep a GEMM each. The repack copies K and V: ``bytes`` of memory.
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
            kv[:, layer] = part.project(rows)
        return kv


class _Part:
    """K and V rows of some layers as one layer of their method's."""

    def __init__(self, attentions: Sequence[DraftAttention]) -> None:
        self._attentions = attentions
        first: Any = attentions[0].qkv_proj
        self._method = first.quant_method
        self._tensors = self._joined()
        self._view = SimpleNamespace(scheme=first.scheme, input_scale=_input_scale(first), **self._tensors)
        self._bias = self._joined_bias()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def refresh(self) -> None:
        for name, value in self._joined().items():
            self._tensors[name].copy_(value)
        self._view.input_scale = _input_scale(self._attentions[0].qkv_proj)
        if self._bias is not None:
            self._bias.copy_(self._joined_bias())

    def project(self, rows: Tensor) -> Tensor:
        """rows [T, hidden] -> [T, these layers' K and V]"""
        return self._method.apply(self._view, rows, self._bias)

    def _joined(self) -> dict[str, Tensor]:
        """Weight and scales, K and V rows of these layers one after the other. One scale of a whole layer alone
        stays as it is."""
        joined = {}
        for name in _PER_ROW:
            whole: list[Tensor] = [getattr(a.qkv_proj, name) for a in self._attentions]
            if len(whole) == 1 and whole[0].numel() == 1:
                joined[name] = whole[0]
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
    """Why K and V rows cannot be taken out of the layers' weights, or None."""
    for index, attention in enumerate(attentions):
        layer: Any = attention.qkv_proj
        served = f"layers.{index}.self_attn.qkv_proj is served by {scheme_name(layer)}"
        if scheme_name(layer) not in _SERVED:
            return served
        owner = layer.quant_method if layer.scheme is None else layer.scheme
        for form in ("use_marlin", "block_quant", "use_mxfp8", "weight_block_size"):
            if getattr(owner, form, None):
                return f"{served} with {form}"
        if attention.q_size % _GRANULE or 2 * attention.kv_size % _GRANULE:
            sizes = f"q {attention.q_size}, kv {attention.kv_size}"
            return f"{served}, whose rows come in {_GRANULE}s: {sizes}"
    return None


def _not_joinable(attentions: Sequence[DraftAttention]) -> str | None:
    """Why sliceable layers keep a GEMM each, or None."""
    first: Any = attentions[0].qkv_proj
    for index, attention in enumerate(attentions):
        layer: Any = attention.qkv_proj
        if scheme_name(layer) != scheme_name(first) or _layout(layer) != _layout(first):
            return f"layers.{index} is quantised in another way than layers.0"
        own = _input_scale(layer)
        if own is not None and own.numel():
            return "each layer has input_scale of its own"
    return None


def _input_scale(layer: Any) -> Tensor | None:
    return getattr(layer, "input_scale", None)


def _layout(layer: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(value.shape, value.dtype) for value in (getattr(layer, name) for name in _PER_ROW)]


def _kv_rows(attention: DraftAttention, tensor: Tensor) -> Tensor:
    """The part of a tensor of qkv_proj that belongs to its K and V rows; one scale counts for all rows."""
    kv_rows = 2 * attention.kv_size
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).expand(kv_rows, 1)
    return tensor.narrow(_row_dimension(tensor), attention.q_size, kv_rows)


def _row_dimension(tensor: Tensor) -> int:
    return 0 if tensor.shape[1] == 1 else 1


def _concatenated(pieces: Sequence[Tensor], dimension: int) -> Tensor:
    """The pieces in memory of their own, in columns where they lie in columns."""
    if pieces[0].stride(0) == 1 and pieces[0].shape[1] > 1:
        return torch.cat([piece.t() for piece in pieces], 1 - dimension).contiguous().t()
    return torch.cat(list(pieces), dimension).contiguous()
