"""ModelOpt's NVFP4 tensors, and the tables of a draft that are read in it and kept dense."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dflash_sglang.checkpoint.own_modules import TABLES
from dflash_sglang.startup.facts import LoadError

GROUP = 16
"""Neighbouring inputs that share a scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits of a code; the fourth is the sign
_PARTS = ("weight", "weight_scale", "weight_scale_2")
_ROWS = 4096  # of a table, at once


def dense_tables(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, those of packed tables as one dense `weight` each, in torch's default dtype.

    An embedding and the matrices of a Markov head are read row by row, by kernels that take dense rows. Raises
    LoadError for a packed table without its scales.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        table, _, part = name.rpartition(".")
        packed = part in _PARTS and (part != "weight" or tensor.dtype == torch.uint8)
        if not packed or table.removeprefix("model.") not in TABLES:
            yield name, tensor
            continue
        parts = held.setdefault(table, {})
        parts[part] = tensor
        if len(parts) == len(_PARTS):
            del held[table]
            yield f"{table}.weight", dequantised(*(parts[of] for of in _PARTS))
    missing = []
    for table, parts in held.items():
        if "weight" in parts:
            missing += [f"{table}.{part}" for part in _PARTS if part not in parts]
        else:  # scales of another format
            yield from ((f"{table}.{part}", tensor) for part, tensor in parts.items())
    if missing:
        raise LoadError(
            f"draft checkpoint: missing tensors {sorted(missing)}. Expected all of {', '.join(_PARTS)} of a table "
            "in NVFP4. Use a complete checkpoint; in an update, send them together."
        )


def dequantised(weight: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """weight [rows, inputs / 2] uint8, two codes in a byte, the low one first; scale [rows, inputs / 16] float8;
    scale_2 [] or [1] float32 -> [rows, inputs] in torch's default dtype: value * scale * scale_2."""
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    out = torch.empty((rows, columns), device=weight.device)
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=weight.device)
    for start in range(0, rows, _ROWS):
        some = slice(start, start + _ROWS)
        codes = torch.stack((weight[some] & 15, weight[some] >> 4), dim=-1).long()
        factors = scale[some].float() * scale_2.float()
        out[some] = (values[codes].view(-1, columns // GROUP, GROUP) * factors[..., None]).flatten(1)
    return out
