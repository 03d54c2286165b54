"""A weight-only int8 quantisation in plain torch, as SGLang's layers take one: config, method, checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def int8_config() -> Any:
    """A weight-only int8 quantisation with one scale per output row.

    Tensors `weight` (int8) and `weight_scale` (float32, [rows, 1]) per linear layer.
    """
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
    from sglang.srt.utils import set_weight_attrs

    class Int8Method(LinearMethodBase):
        def create_weights(
            self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size,
            params_dtype, **attrs,
        ):  # fmt: skip
            columns = {"weight": (input_size_per_partition, torch.int8), "weight_scale": (1, torch.float32)}
            for name, (width, dtype) in columns.items():
                values = torch.zeros(sum(output_partition_sizes), width, dtype=dtype)
                parameter = nn.Parameter(values, requires_grad=False)
                set_weight_attrs(parameter, {"input_dim": 1, "output_dim": 0, **attrs})
                layer.register_parameter(name, parameter)

        def apply(self, layer, x, bias=None):
            return torch.nn.functional.linear(x, dequantised(layer.weight, layer.weight_scale).to(x.dtype), bias)

    class Int8Config(QuantizationConfig):
        def get_quant_method(self, layer, prefix):
            return Int8Method() if isinstance(layer, LinearBase) else None

        def get_name(self):
            return "int8_for_tests"

        def get_supported_act_dtypes(self):
            return [torch.float32, torch.bfloat16]

        @classmethod
        def get_min_capability(cls):
            return 0

        @staticmethod
        def get_config_filenames():
            return []

        @classmethod
        def from_config(cls, config):
            return cls()

        def get_scaled_act_names(self):
            return []

    return Int8Config()


def quantised(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors of a matrix in int8, as int8_config reads it."""
    scale = tensor.abs().amax(dim=1, keepdim=True) / 127
    return {name: (tensor / scale).round().to(torch.int8), f"{name.removesuffix('.weight')}.weight_scale": scale}


def dequantised(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.float() * scale
