"""Readers of quantised checkpoints, written from the formats' definitions, element by element where it matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, in AWQ and in Marlin


def dequantised(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The checkpoint's matrices [out, in] in float32 and its other tensors, by their unquantised names."""
    out = {}
    modules = {name.rpartition(".")[0] for name in tensors if not name.endswith("norm.weight")}
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in modules or name.endswith(".bias"):
            out[name] = tensor.float()
    for module in modules:
        own = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
        out[f"{module}.weight"] = matrix(own, config)
    return out


def matrix(own: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """One module's matrix [out, in] in float32, from its tensors by suffix."""
    method = config["quant_method"]
    if "weight_scale_2" in own:
        return _nvfp4(own["weight"], own["weight_scale"], own["weight_scale_2"])
    if "weight" in own:
        return own["weight"].float() * own["weight_scale"].float().reshape(-1, 1)
    if method == "compressed-tensors":
        rows, inputs = own["weight_shape"].tolist()
        levels = nibbles(own["weight_packed"]).reshape(rows, inputs)
        group = own.get("weight_g_idx", torch.arange(inputs) // (inputs // own["weight_scale"].shape[1]))
        zeros = torch.full((rows, own["weight_scale"].shape[1]), 8)
        if "weight_zero_point" in own:
            zeros = nibbles(own["weight_zero_point"].t()).t()
        return (levels - zeros[:, group.long()]) * own["weight_scale"].float()[:, group.long()]
    if method == "awq":
        levels, zeros = awq(own["qweight"]), awq(own["qzeros"])
        group = torch.arange(levels.shape[0]) // (levels.shape[0] // zeros.shape[0])
        return ((levels - zeros[group]) * own["scales"].float()[group]).t()
    levels = nibbles(own["qweight"].t()).t()  # gptq: eight inputs to a word
    zeros = nibbles(own["qzeros"]) + 1
    group = own["g_idx"].long()
    return ((levels - zeros[group]) * own["scales"].float()[group]).t()


def nibbles(words: Tensor) -> Tensor:
    """int32 [rows, n] -> [rows, 8 * n], the lowest nibble of a word first."""
    raw = words.contiguous().cpu().numpy().view(np.uint32)
    parts = [(raw >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)]
    return torch.from_numpy(np.stack(parts, axis=-1).reshape(raw.shape[0], -1).astype(np.int64))


def _nvfp4(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """Sign, two bits of an exponent and one of a mantissa; the even input in a byte's low nibble."""
    raw = packed.numpy()
    codes = np.stack((raw & 15, raw >> 4), axis=-1).reshape(raw.shape[0], -1).astype(np.int64)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    subnormal = exponent == 0
    values = np.where(subnormal, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1)) * (1 - 2 * sign)
    group = np.arange(codes.shape[1]) // 16
    return torch.from_numpy(values).float() * scale.float()[:, group] * float(scale_2)


def awq(words: Tensor) -> Tensor:
    """int32 [rows, n] -> [rows, 8 * n] columns in their natural order."""
    plain = nibbles(words).view(words.shape[0], -1, 8)
    natural = torch.empty_like(plain)
    natural[..., list(NIBBLE_ORDER)] = plain
    return natural.flatten(1)
