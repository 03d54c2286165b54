"""SGLang's quantised kernels in plain torch for a machine without a GPU: layers and their processing are SGLang's.

Each twin reads the tensors in the layout that the real kernel gets. Marlin's is decoded from its definition:
tiles of 16 inputs by 64 output rows, in which lane 4*g + t of warp column w holds the inputs 2t, 2t+1, 2t+8 and
2t+9 of the rows 16w + g and 16w + g + 8.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.quantised_layouts import NIBBLE_ORDER, awq, nibbles

FP8_MAX = 448.0


def install(patch: pytest.MonkeyPatch) -> None:
    """Replaces the kernels, and the checks that there is a GPU for them, by patches of `patch`."""
    from sglang.srt.hardware_backend.gpu.quantization import awq_kernels, gptq_kernels
    from sglang.srt.layers.quantization import fp8, marlin_utils, marlin_utils_fp4, modelopt_quant, utils
    from sglang.srt.layers.quantization.awq import AWQMarlinConfig
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_fp8 as ct_fp8,
    )
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_int8 as ct_int8,
    )
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_wNa16 as ct_4_bits,
    )
    from sglang.srt.layers.quantization.gptq import GPTQMarlinConfig

    patch.setattr(fp8, "_is_cpu", False)
    patch.setattr(fp8, "cutlass_fp8_supported", lambda: True)
    patch.setattr(fp8, "get_device_capability", lambda: (9, 0))
    patch.setattr(fp8, "apply_fp8_linear", fp8_linear)
    patch.setattr(fp8, "per_token_group_quant_fp8", lambda x, size: fp8_rows(x))
    patch.setattr(ct_fp8, "apply_fp8_linear", fp8_linear)
    patch.setattr(utils, "scaled_fp8_quant", lambda x, scale: (to_fp8(x / scale), scale))
    patch.setattr(ct_int8, "per_token_quant_int8", int8_rows)
    patch.setattr(ct_int8, "int8_scaled_mm", int8_scaled_mm, raising=False)
    patch.setattr(compressed_tensors.CompressedTensorsConfig, "_check_scheme_supported", lambda *args, **kw: True)
    patch.setattr(marlin_utils, "_check_marlin_supported", lambda *args: (True, None))
    four_bits = SimpleNamespace(size_bits=4)
    patch.setattr(ct_4_bits, "WNA16_SUPPORTED_TYPES_MAP", {4: four_bits})
    patch.setattr(ct_4_bits, "WNA16_ZP_SUPPORTED_TYPES_MAP", {4: four_bits})
    patch.setattr(GPTQMarlinConfig, "TYPE_MAP", {(4, True): four_bits})
    patch.setattr(AWQMarlinConfig, "TYPE_MAP", {4: four_bits})
    for module in (awq_kernels, gptq_kernels, ct_4_bits, marlin_utils_fp4):
        patch.setattr(module, "marlin_make_workspace", lambda device: torch.zeros(1, dtype=torch.int32))
    patch.setattr(gptq_kernels, "gptq_marlin_repack", gptq_marlin_repack)
    patch.setattr(ct_4_bits, "gptq_marlin_repack", gptq_marlin_repack, raising=False)
    patch.setattr(awq_kernels, "awq_marlin_repack", awq_marlin_repack)
    patch.setattr(gptq_kernels, "apply_gptq_marlin_linear", marlin_linear)
    patch.setattr(ct_4_bits, "apply_gptq_marlin_linear", marlin_linear)
    patch.setattr(awq_kernels, "apply_awq_marlin_linear", marlin_linear)
    patch.setattr(marlin_utils_fp4, "gptq_marlin_repack", gptq_marlin_repack, raising=False)
    patch.setattr(modelopt_quant, "apply_fp4_marlin_linear", fp4_marlin_linear)
    patch.setattr(modelopt_quant, "prepare_nvfp4_layer_for_marlin", as_in_bfloat16)


def activate() -> None:
    """Entry point in a server on a CPU: drafts in NVFP4 are served with these kernels, in float32."""
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

    from dflash_sglang.startup import decisions

    patch, check = pytest.MonkeyPatch(), decisions.quantisation_problems
    install(patch)
    patch.setattr(
        decisions, "quantisation_problems", lambda config, asked, device, *to: check(config, asked, "cuda")
    )
    patch.setattr(ModelOptFp4Config, "get_supported_act_dtypes", classmethod(lambda cls: [torch.float32]))


def to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / FP8_MAX
    return to_fp8(x / scale), scale


def fp8_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_scale: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """weight [in, out] in columns, as CUTLASS asks; weight_scale one, or one per output row."""
    assert weight.stride(0) == 1, "a weight in rows"
    levels, scale = fp8_rows(input) if input_scale is None else (to_fp8(input / input_scale), input_scale)
    out = levels.float() @ weight.float() * scale * weight_scale.reshape(1, -1)
    return (out if bias is None else out + bias).to(input.dtype)


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / 127
    return (x / scale).round().to(torch.int8), scale


def int8_scaled_mm(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, out_dtype: torch.dtype, bias: Any = None
) -> Tensor:
    assert weight.stride(0) == 1 and weight_scale.numel() == weight.shape[1]
    out = x.float() @ weight.float() * x_scale * weight_scale.reshape(1, -1)
    return (out if bias is None else out + bias).to(out_dtype)


def gptq_marlin_repack(b_q_weight: Tensor | None = None, *args: Any, **kw: Any) -> Tensor:
    """[in / 8, out] of eight inputs to a word -> Marlin's layout; `perm`: the order of the inputs, or empty."""
    perm, size_k, size_n = kw["perm"], kw["size_k"], kw["size_n"]
    assert b_q_weight is not None
    levels = nibbles(b_q_weight.t()).t().reshape(size_k, size_n)
    return to_marlin(levels[perm.long()] if perm.numel() else levels)


def awq_marlin_repack(words: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    assert num_bits == 4
    return to_marlin(awq(words.view(size_k, -1)))


def _places(size_k: int, size_n: int) -> tuple[Tensor, Tensor]:
    """Input and output row of every nibble of a Marlin weight, [in / 16, out * 2, 8] each."""
    word, nibble = torch.arange(128)[:, None], torch.arange(8)[None, :]
    lane, warp = word // 4, word % 4
    slot = torch.tensor(NIBBLE_ORDER)[nibble]  # of the eight values of a lane, those that a nibble holds
    row = 16 * warp + lane // 4 + 8 * (slot // 4)
    column = 2 * (lane % 4) + torch.tensor([0, 1, 8, 9])[slot % 4]
    k = column.repeat(size_n // 64, 1)
    n = (row[None] + 64 * torch.arange(size_n // 64)[:, None, None]).reshape(-1, 8)
    tiles = 16 * torch.arange(size_k // 16)[:, None, None]
    return k[None] + tiles, n[None].expand(size_k // 16, -1, -1)


def to_marlin(levels: Tensor) -> Tensor:
    """levels [in, out] -> int32 [in / 16, out * 2]."""
    k, n = _places(*levels.shape)
    words = sum(levels[k[..., i], n[..., i]].long() << (4 * i) for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def from_marlin(words: Tensor) -> Tensor:
    """int32 [in / 16, out * 2] -> levels [in, out]."""
    size_k, size_n = words.shape[0] * 16, words.shape[1] // 2
    k, n = _places(size_k, size_n)
    levels = torch.empty(size_k, size_n, dtype=torch.int64)
    levels[k.flatten(), n.flatten()] = nibbles(words).flatten()
    return levels


def marlin_scales(scales: Tensor, grouped: bool) -> Tensor:
    """scales [groups, out] in Marlin's order of the output rows -> in their natural order."""
    if grouped:
        order = [i + 8 * j for i in range(8) for j in range(8)]
    else:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    blocks = scales.reshape(scales.shape[0], -1, len(order))
    natural = torch.empty_like(blocks)
    natural[..., order] = blocks
    return natural.flatten(1)


def marlin_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_zp: Tensor,
    g_idx: Tensor,
    g_idx_sort_indices: Tensor,
    input_size_per_partition: int,
    output_size_per_partition: int,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    size_k, size_n = input_size_per_partition, output_size_per_partition
    assert weight.shape == (size_k // 16, size_n * 2) and weight.is_contiguous()
    levels, groups = from_marlin(weight), weight_scale.shape[0]
    assert weight_scale.shape[1] == size_n
    scales = marlin_scales(weight_scale.float(), groups > 1)
    zeros = torch.full((groups, size_n), 8)
    if weight_zp.numel():
        zeros = marlin_scales(awq(weight_zp), True)
    group = g_idx.long() if g_idx.numel() else torch.arange(size_k) // (size_k // groups)
    if g_idx.numel():
        input = input[:, g_idx_sort_indices.long()]
    matrix = (levels - zeros[group]) * scales[group]
    out = (input.float() @ matrix).to(input.dtype)
    return out if bias is None else out.add_(bias)


def as_in_bfloat16(layer: Any) -> None:
    """SGLang's processing of a layer for Marlin, which is for half precision, of one whose rows are float32."""
    from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_nvfp4_layer_for_marlin

    dtype, layer.params_dtype = layer.params_dtype, torch.bfloat16
    prepare_nvfp4_layer_for_marlin(layer)
    layer.params_dtype = dtype


def fp4_marlin_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_global_scale: Tensor,
    workspace: Tensor,
    size_n: int,
    size_k: int,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Group scales are the upper bytes of half-precision numbers without their sign, 128 times the scale, two of
    four neighbours exchanged; the global scale is in bfloat16, times 2 ** 119."""
    padded_k, padded_n = weight.shape[0] * 16, weight.shape[1] // 2
    assert weight_global_scale.dtype == torch.bfloat16 and workspace.dtype == torch.int32 and bias is None
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = from_marlin(weight)
    levels = torch.where(codes > 7, -values[codes & 7], values[codes & 7])
    halves = (weight_scale.view(torch.uint8).to(torch.int16) << 7).view(torch.float16).float() / 128
    halves = halves.view(-1, 4)[:, [0, 2, 1, 3]].view(-1, padded_n)
    scales = marlin_scales(halves, grouped=True).repeat_interleave(16, dim=0)
    assert scales.shape == (padded_k, padded_n)
    matrix = levels * scales * (weight_global_scale.float() * 2.0**-119)
    return (input.float() @ matrix[:size_k, :size_n]).to(input.dtype)
