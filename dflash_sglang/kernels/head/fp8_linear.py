"""A linear layer in float8_e4m3fn, with a scale for each row of the weight and for each row of the activations."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_sglang.sglang_names.scheduler import apply_fp8_linear

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [N, k] of any float dtype on a CPU, float16 or bfloat16 on a GPU; weight [n, k] float8_e4m3fn and scale
    [n, 1] float32, as of `quantise_rows` -> [N, n] of x's dtype. N > 0. On a GPU n and k are multiples of 16, and
    it is capturable in a CUDA graph."""
    if x.is_cuda:  # SGLang's kernels: a quantisation of the rows, a GEMM that applies both scales
        return apply_fp8_linear(x.contiguous(), weight.T, scale)
    return fp8_linear_torch(x, weight, scale)


def fp8_linear_torch(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The definition of `fp8_linear` in torch operations."""
    quantised, x_scale = quantise_rows(x)
    return (quantised.float() @ weight.float().T * x_scale * scale.T).to(x.dtype)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, k] of any float dtype -> float8_e4m3fn [N, k] and scales [N, 1] float32: a row's largest magnitude
    becomes the type's. A row of zeros has scale 0."""
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / LARGEST
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (x * inverse).clamp(-LARGEST, LARGEST).to(FP8), scale
