"""Rounding of matrices to few levels, and four-bit levels packed into int32 words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PER_WORD = 8
PLAIN_ORDER = tuple(range(PER_WORD))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours lies in each nibble of a word, the lowest nibble first."""

_SHRINK = tuple(1 - 0.03 * step for step in range(1, 12))


@dataclass(frozen=True)
class Grouped:
    """A matrix [out, in] as (levels - zeros) * scales, in groups of inputs.

    levels [out, in] in 0..15, zeros [out, groups] in 0..15, scales [out, groups], group_of_input [in] int32.
    """

    levels: Tensor
    zeros: Tensor
    scales: Tensor
    group_of_input: Tensor


def symmetric_round(weight: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> (levels in -largest..largest, scale [out, 1]) by the largest element of each row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / largest
    return (weight / scale).round().clamp(-largest, largest), scale


def group_round(
    weight: Tensor,
    group_size: int,
    zero_points: bool,
    scale_dtype: torch.dtype,
    order: Tensor | None = None,
    moments: Tensor | None = None,
) -> Grouped:
    """weight [out, in] in groups of `group_size` inputs, neighbours or, with `order` [in], in that order.

    Without zero points they are all 8. Plain rounding to nearest, or, with the second moments [in, in] of the
    inputs, GPTQ's: each input's rounding error is made up for by the inputs after it
    (https://arxiv.org/abs/2210.17323). Raises ValueError where the groups do not divide the inputs.
    """
    rows, inputs = weight.shape
    if inputs % group_size:
        raise ValueError(f"{inputs} inputs: expected a multiple of the group size {group_size}")
    order = torch.arange(inputs) if order is None else order
    work, levels = weight[:, order].clone(), torch.empty(rows, inputs)
    compensation = None if moments is None else _compensation(moments[order][:, order])
    zeros, scales = [], []
    for start in range(0, inputs, group_size):
        zero, scale = _grid(work[:, start : start + group_size], zero_points, scale_dtype)
        zeros.append(zero)
        scales.append(scale)
        for column in range(start, start + group_size):
            level = ((work[:, column] / scale.float()).round() + zero).clamp(0, 15)
            levels[:, column] = level
            if compensation is not None:
                error = (work[:, column] - (level - zero) * scale.float()) / compensation[column, column]
                work[:, column + 1 :] -= error[:, None] * compensation[column, column + 1 :]
    natural = torch.empty(rows, inputs, dtype=torch.int32)
    natural[:, order] = levels.to(torch.int32)
    group_of_input = torch.empty(inputs, dtype=torch.int32)
    group_of_input[order] = torch.arange(inputs, dtype=torch.int32) // group_size
    return Grouped(natural, torch.stack(zeros, 1).to(torch.int32), torch.stack(scales, 1), group_of_input)


def _compensation(moments: Tensor) -> Tensor:
    """Upper Cholesky factor of the damped moments' inverse: row i says how input i's error spreads."""
    damped = moments.double() + 0.01 * moments.diagonal().double().mean() * torch.eye(len(moments)).double()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _grid(group: Tensor, zero_points: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """group [out, size] -> zero points and scales [out], those of twelve ranges, from the whole one down to two
    thirds of it, that round the group with the least squared error."""
    zeros, scales = _grid_of_range(group, 1.0, zero_points, scale_dtype)
    least = _squared_error(group, zeros, scales)
    for shrink in _SHRINK:
        zero, scale = _grid_of_range(group, shrink, zero_points, scale_dtype)
        error = _squared_error(group, zero, scale)
        better = error < least
        zeros, scales = torch.where(better, zero, zeros), torch.where(better, scale, scales)
        least = torch.minimum(least, error)
    return zeros, scales


def _grid_of_range(
    group: Tensor, shrink: float, zero_points: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if zero_points:
        low, high = group.amin(-1).clamp(max=0) * shrink, group.amax(-1).clamp(min=0) * shrink
        scales = ((high - low) / 15).clamp(min=1e-8).to(scale_dtype)
        return (-low / scales.float()).round().clamp(0, 15), scales
    scales = (group.abs().amax(-1) * shrink / 7.5).clamp(min=1e-8).to(scale_dtype)
    return torch.full(scales.shape, 8.0), scales


def _squared_error(group: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    wide = scales.float()[:, None]
    levels = ((group / wide).round() + zeros[:, None]).clamp(0, 15)
    return ((levels - zeros[:, None]) * wide - group).pow(2).sum(-1)


def packed(levels: Tensor, order: Sequence[int] = PLAIN_ORDER) -> Tensor:
    """levels [rows, columns] in 0..15 -> int32 [rows, columns / 8], eight columns of a row in a word."""
    nibbles = levels.to(torch.int64).reshape(levels.shape[0], -1, PER_WORD)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int64)
    for nibble, column in enumerate(order):
        words |= nibbles[..., column] << (4 * nibble)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
