"""A quantised copy of a draft checkpoint, in the layout that SGLang loads, in plain torch.

``python -m training.quantise --scheme awq --out DIR`` quantises every linear layer of the package's draft (or of
``--draft``), ``fc`` included; norms stay as they are. Scales come from the weights, static activation scales and
GPTQ's rounding of the four-bit schemes from a calibration with the reference loop. The schemes:

fp8-dynamic, fp8-static                `fp8`: one scale per matrix; activations per token, or one static scale
ct-w8a8-fp8, ct-w8a8-fp8-static        `compressed-tensors`: scales per output row and token; per matrix and static
ct-w8a8-int8                           int8, scales per output row and token
ct-w4a16, -asym, -actorder             4 bits in groups of inputs; with zero points; with an activation order
awq                                    4 bits with zero points, in AutoAWQ's order
gptq, gptq-actorder                    4 bits, symmetric; with an activation order
nvfp4-a16                              `modelopt`: E2M1 in groups of 16; activations as they are
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_sglang.bench.script import script_parser
from training.calibrate import Inputs, read_inputs
from training.packing import AWQ_ORDER, Grouped, group_round, packed, symmetric_round
from training.pair import pair_directories

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
GROUP_SIZE = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a 4-bit float."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that a server stacks: an activation order, or NVFP4's scale of a matrix, is the same for all of them."""


Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in] in float32; ``read``: what its layer read in a calibration, None without one; ``order``:
    its inputs [in] from the most to the least important, for schemes with an activation order; ``largest``:
    magnitude in all the modules that are stacked with it."""

    weight: Tensor
    read: Inputs | None
    order: Tensor | None
    largest: float


@dataclass(frozen=True)
class Scheme:
    """``tensors(matrix)`` gives the module's tensors by suffix; ``config``: the checkpoint's
    quantization_config. ``static``: it needs a calibration; ``ordered``: it needs an order."""

    config: Mapping[str, Any]
    tensors: Callable[[Matrix], Tensors]
    static: bool = False
    ordered: bool = False


def quantise(weights: Mapping[str, Tensor], scheme: Scheme, read: Mapping[str, Inputs] | None = None) -> Tensors:
    """The checkpoint's tensors with every matrix in the scheme's layout.

    weights: by z-lab name; read: a calibration by module name, without which four-bit schemes round plainly.
    Raises ValueError for a `static` scheme without one.
    """
    if scheme.static and read is None:
        raise ValueError(
            "static activation scales: expected a calibration. Pass training.calibrate.read_inputs()."
        )
    out: Tensors = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            out[name] = weight
            continue
        module = name.removesuffix(".weight")
        order = _input_order(module, weights, read) if scheme.ordered else None
        largest = max(float(weights[f"{name}.weight"].abs().max()) for name in _stacked(module))
        matrix = Matrix(weight.float(), None if read is None else read[module], order, largest)
        for suffix, tensor in scheme.tensors(matrix).items():
            out[f"{module}.{suffix}"] = tensor.contiguous()
    return out


def _input_order(module: str, weights: Mapping[str, Tensor], read: Mapping[str, Inputs] | None) -> Tensor:
    """By the size of the inputs, or of their weights, in all the modules that are stacked with this one."""
    modules = _stacked(module)
    if read is None:
        sizes = [weights[f"{name}.weight"].float().pow(2).sum(0) for name in modules]
    else:
        sizes = [read[name].moments.diagonal() for name in modules]
    return torch.stack(sizes).sum(0).argsort(descending=True)


def _stacked(module: str) -> list[str]:
    owner, _, leaf = module.rpartition(".")
    stacked = next((names for names in FUSED if leaf in names), (leaf,))
    return [f"{owner}.{name}" if owner else name for name in stacked]


def _fp8_tensor(matrix: Matrix, static: bool) -> Tensors:
    scale = matrix.weight.abs().max() / FP8_MAX
    tensors = {"weight": (matrix.weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), "weight_scale": scale}
    if static:
        assert matrix.read is not None
        tensors["input_scale"] = torch.tensor(matrix.read.largest / FP8_MAX)
    return tensors


def _fp8(matrix: Matrix) -> Tensors:
    return _fp8_tensor(matrix, static=False)


def _fp8_static(matrix: Matrix) -> Tensors:
    return _fp8_tensor(matrix, static=True)


def _ct_fp8_static(matrix: Matrix) -> Tensors:
    return {n: t.reshape(1) if t.ndim == 0 else t for n, t in _fp8_static(matrix).items()}


def _ct_fp8_rows(matrix: Matrix) -> Tensors:
    scale = matrix.weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
    return {"weight": (matrix.weight / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), "weight_scale": scale}


def _ct_int8(matrix: Matrix) -> Tensors:
    levels, scale = symmetric_round(matrix.weight, 127)
    return {"weight": levels.to(torch.int8), "weight_scale": scale}


def _grouped(matrix: Matrix, zero_points: bool, scale_dtype: torch.dtype) -> Grouped:
    moments = None if matrix.read is None else matrix.read.moments
    return group_round(matrix.weight, GROUP_SIZE, zero_points, scale_dtype, matrix.order, moments)


def _ct_4_bits(matrix: Matrix, zero_points: bool = False) -> Tensors:
    grouped = _grouped(matrix, zero_points, torch.bfloat16)
    out = {
        "weight_packed": packed(grouped.levels),
        "weight_scale": grouped.scales,
        "weight_shape": torch.tensor(matrix.weight.shape),
    }
    if zero_points:
        out["weight_zero_point"] = packed(grouped.zeros.t()).t()
    if matrix.order is not None:
        out["weight_g_idx"] = grouped.group_of_input
    return out


def _ct_4_bits_asymmetric(matrix: Matrix) -> Tensors:
    return _ct_4_bits(matrix, zero_points=True)


def _awq(matrix: Matrix) -> Tensors:
    grouped = _grouped(matrix, True, torch.float16)
    return {
        "qweight": packed(grouped.levels.t(), AWQ_ORDER),
        "qzeros": packed(grouped.zeros.t(), AWQ_ORDER),
        "scales": grouped.scales.t(),
    }


def _gptq(matrix: Matrix) -> Tensors:
    grouped = _grouped(matrix, False, torch.float16)
    return {
        "qweight": packed(grouped.levels).t(),  # eight inputs to a word
        "qzeros": packed((grouped.zeros - 1).t()),  # the format stores a zero point less one
        "scales": grouped.scales.t(),
        "g_idx": grouped.group_of_input,
    }


def _nvfp4(matrix: Matrix) -> Tensors:
    """One scale for the stack, of few digits (a kernel may read it in bfloat16), and one for 16 inputs."""
    scale_2 = torch.tensor(matrix.largest / (E2M1[-1] * FP8_MAX)).bfloat16().float()
    groups = matrix.weight.unflatten(1, (-1, 16))
    scales = groups.abs().amax(-1) / (E2M1[-1] * scale_2)
    scales = scales.clamp(torch.finfo(FP8).tiny, FP8_MAX).to(FP8)
    levels = (groups / (scales.float() * scale_2)[..., None]).flatten(1)
    values = torch.tensor(E2M1)
    codes = torch.bucketize(levels.abs(), (values[1:] + values[:-1]) / 2) + 8 * (levels < 0)
    pairs = codes.unflatten(1, (-1, 2))
    return {
        "weight": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": scale_2,
    }


def _ct(kind: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "format": kind}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _args(bits: int, kind: str, strategy: str, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": dynamic, "symmetric": True} | more


def _ct_4_bit_scheme(zero_points: bool = False, ordered: bool = False) -> Scheme:
    more = {"group_size": GROUP_SIZE, "symmetric": not zero_points, "actorder": "group" if ordered else None}
    config = _ct("pack-quantized", _args(4, "int", "group", **more), None)
    return Scheme(config, _ct_4_bits_asymmetric if zero_points else _ct_4_bits, ordered=ordered)


def _gptq_scheme(ordered: bool) -> Scheme:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP_SIZE,
        "desc_act": ordered,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    return Scheme(config, _gptq, ordered=ordered)


_AWQ_CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
_PER_TOKEN = {"strategy": "token", "dynamic": True}

SGLANG_METHODS = {"awq": "awq_marlin", "gptq": "gptq_marlin", "modelopt": "modelopt_fp4"}
"""SGLang's names of what `quant_method` names otherwise, as it resolves them on a GPU."""

SCHEMES: Mapping[str, Scheme] = {
    "fp8-dynamic": Scheme({"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8),
    "fp8-static": Scheme({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_static, static=True),
    "ct-w8a8-fp8": Scheme(
        _ct("float-quantized", _args(8, "float", "channel"), _args(8, "float", **_PER_TOKEN)), _ct_fp8_rows
    ),
    "ct-w8a8-fp8-static": Scheme(
        _ct("float-quantized", _args(8, "float", "tensor"), _args(8, "float", "tensor")),
        _ct_fp8_static,
        static=True,
    ),
    "ct-w8a8-int8": Scheme(
        _ct("int-quantized", _args(8, "int", "channel"), _args(8, "int", **_PER_TOKEN)), _ct_int8
    ),
    "ct-w4a16": _ct_4_bit_scheme(),
    "ct-w4a16-asym": _ct_4_bit_scheme(zero_points=True),
    "ct-w4a16-actorder": _ct_4_bit_scheme(ordered=True),
    "awq": Scheme(_AWQ_CONFIG, _awq),
    "gptq": _gptq_scheme(ordered=False),
    "gptq-actorder": _gptq_scheme(ordered=True),
    "nvfp4-a16": Scheme({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]}, _nvfp4),
}


def quantise_checkpoint(name: str, out: Path, draft: Path, read: Mapping[str, Inputs] | None = None) -> Path:
    """Writes the checkpoint `draft` to the directory `out` in a scheme of SCHEMES; returns `out`."""
    scheme = SCHEMES[name]
    out.mkdir(parents=True, exist_ok=True)
    weights = {k: w for file in sorted(draft.glob("*.safetensors")) for k, w in load_file(file).items()}
    config = json.loads((draft / "config.json").read_text())
    config["quantization_config"] = dict(scheme.config)
    for file in draft.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, out)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(quantise(weights, scheme, read), out / "model.safetensors", metadata={"format": "pt"})
    return out


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--scheme", required=True, choices=sorted(SCHEMES))
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--draft", type=Path, default=Path(pair_directories()["draft"]))
    args = parser.parse_args()
    print(quantise_checkpoint(args.scheme, args.out, args.draft, read_inputs(args.draft)))


if __name__ == "__main__":
    main()
