"""Which quantised drafts can be served: the checkpoint's quantization_config and the flags, as problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_sglang.startup.facts import Problem

FIELD = "draft config quantization_config"
FLAG = "--speculative-draft-model-quantization"

# Methods whose packed layouts this package knows and tests.
_KNOWN = ("fp8", "compressed-tensors", "awq", "gptq")
# Methods that SGLang's linear layers serve, and that context KV goes through layer by layer.
_PASSED_ON = ("w8a8_int8", "w8a8_fp8", "blockwise_int8", "mxfp8", "modelopt_fp8", "quark", "auto-round")
# Methods that cannot quantise dense weights while loading; ModelOpt's may be described in a file of its own.
_NEED_A_CHECKPOINT = (
    *("auto-round", "auto-round-int8", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "gguf", "gptq"),
    *("gptq_marlin", "modelslim", "moe_wna16", "mxfp4", "petit_nvfp4", "quark", "w4afp8", "w8a8_int8"),
)
MODELOPT = ("modelopt", "modelopt_fp8", "modelopt_mixed")
_NVFP4 = ("W4A16_NVFP4", "NVFP4")
_NVFP4_GPU = (8, 0)  # compute capability: of Marlin, which runs them below 10.0
_DENSE_ON_CPU = "an unquantised draft on --device cpu: the kernels of quantised weights need a CUDA GPU"
_GROUPS = (None, -1, 32, 64, 128)
_DENSE_FIX = "Serve the draft in bf16, or quantise it as one of these (training/quantise.py writes them)."


def quantisation_problems(
    config: Mapping[str, Any],
    asked: str | None,
    device: str,
    inherited: bool = False,
    described: bool = False,
    capability: tuple[int, int] | None = None,
) -> Iterator[Problem]:
    """What is wrong with a draft's quantisation; a malformed quantization_config is for DraftSpec to refuse.

    config: the raw config.json; asked: --speculative-draft-model-quantization as SGLang resolves it, None for
    unquant; inherited: whether that is --quantization, which SGLang takes for the draft too; device: --device;
    described: whether ModelOpt's hf_quant_config.json is beside the config.json; capability: of the GPU, where
    there is one.
    """
    quantisation = config.get("quantization_config") or config.get("compression_config")
    field = "--quantization" if inherited else FLAG
    if isinstance(quantisation, Mapping):
        if device == "cpu":
            fix = "Serve the draft in float32 or bfloat16, or on a GPU."
            yield Problem(FIELD, quantisation.get("quant_method"), _DENSE_ON_CPU, fix)
        else:
            yield from _config_problems(quantisation)
            yield from _nvfp4_problems(config, quantisation, capability)
    elif device == "cpu" and asked is not None:
        yield Problem(field, asked, _DENSE_ON_CPU, f"Set {FLAG} unquant, or serve on a GPU.")
    elif _plain(asked) in _NEED_A_CHECKPOINT or (_plain(asked) in MODELOPT and not described):
        expected = "a quantised draft checkpoint for it, but the draft's config.json has no quantization_config"
        yield Problem(field, asked, expected, f"Set {FLAG} unquant, or fp8 to quantise the draft while loading.")


def _config_problems(quantisation: Mapping[str, Any]) -> Iterator[Problem]:
    method, algorithm = _plain(quantisation.get("quant_method")), quantisation.get("quant_algo")
    if method in ("", "modelopt") and algorithm == "FP8":
        method = "modelopt_fp8"  # as SGLang reads it
    if method in ("modelopt", "modelopt_fp4") or (method == "" and algorithm is not None):
        known = _NVFP4 if method == "modelopt_fp4" else ("FP8", *_NVFP4)
        if algorithm not in known:
            yield _not_among(f"{FIELD}.quant_algo", algorithm, known, "what ModelOpt's drafts are served in")
    elif method == "compressed-tensors":
        yield from _compressed_tensors_problems(quantisation)
    elif method in ("awq", "gptq"):
        yield from _four_bit_problems(method, quantisation)
    elif method not in (*_KNOWN, *_PASSED_ON):
        expected = "one of " + ", ".join((*_KNOWN, *_PASSED_ON, "modelopt"))
        yield Problem(f"{FIELD}.quant_method", quantisation.get("quant_method"), expected, _DENSE_FIX)


def _nvfp4_problems(
    config: Mapping[str, Any], quantisation: Mapping[str, Any], capability: tuple[int, int] | None
) -> Iterator[Problem]:
    algorithm = quantisation.get("quant_algo")
    if algorithm not in _NVFP4:
        return
    if capability is not None and capability < _NVFP4_GPU:
        has = ".".join(map(str, capability))
        expected = f"a GPU of compute capability {'.'.join(map(str, _NVFP4_GPU))} or more, and this one has {has}"
        yield Problem(f"{FIELD}.quant_algo", algorithm, expected, "Serve the draft in bf16, or on a newer GPU.")
    if quantisation.get("group_size") not in (None, 16):
        yield _not_among(f"{FIELD}.group_size", quantisation["group_size"], (None, 16), "NVFP4's groups")
    if config.get("attention_bias"):
        expected = f"false beside {algorithm}: SGLang cannot add biases to its Marlin kernel"
        yield Problem("draft config attention_bias", config["attention_bias"], expected, _DENSE_FIX)


def _four_bit_problems(method: str, quantisation: Mapping[str, Any]) -> Iterator[Problem]:
    expected: dict[str, tuple[Any, ...]] = {"group_size": _GROUPS}
    if method == "awq":
        expected |= {"bits": (4,), "zero_point": (True,), "version": (None, "gemm", "GEMM")}
    else:
        expected |= {"bits": (4, 8), "sym": (True,), "checkpoint_format": (None, "", "gptq", "gptq_v2")}
    for field, values in expected.items():
        value = quantisation.get(field)
        if value not in values:
            yield _not_among(f"{FIELD}.{field}", value, values, f"what SGLang's {method} kernel reads")


def _compressed_tensors_problems(quantisation: Mapping[str, Any]) -> Iterator[Problem]:
    groups = quantisation.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        yield Problem(f"{FIELD}.config_groups", groups, "an object with a group of layers by name", _DENSE_FIX)
        return
    for name, group in groups.items():
        field = f"{FIELD}.config_groups.{name}"
        weights = (group.get("weights") or {}) if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            yield Problem(field, group, "an object that has one as its weights", _DENSE_FIX)
            continue
        layout = group.get("format") or quantisation.get("format")
        bits, kind, size = weights.get("num_bits"), weights.get("type", "int"), weights.get("group_size")
        known = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
        if layout not in known:
            yield _not_among(f"{field}.format", layout, known, "formats of W8A8 and W4A16 drafts")
        elif layout == "pack-quantized":
            wide = weights.get("symmetric", True)
            if kind != "int" or bits not in ((4, 8) if wide else (4,)):
                what = f"{bits}-bit {kind}, {'symmetric' if wide else 'asymmetric'}"
                yield Problem(f"{field}.weights", what, "int4, or symmetric int8", _DENSE_FIX)
            if size not in _GROUPS:
                yield _not_among(f"{field}.weights.group_size", size, _GROUPS, "Marlin's groups")
        elif bits != 8:
            yield _not_among(f"{field}.weights.num_bits", bits, (8,), f"{layout} weights")
        elif kind == "int" and (strategy := weights.get("strategy")) != "channel":
            # SGLang rounds int8 weights with one scale per matrix to fp8 when it stacks q, k and v.
            yield _not_among(f"{field}.weights.strategy", strategy, ("channel",), "scales of int8 weights")


def _not_among(field: str, value: object, values: tuple[Any, ...], what: str) -> Problem:
    return Problem(field, value, f"one of {', '.join(map(str, values))}: {what}", _DENSE_FIX)


def _plain(method: Any) -> str:
    return str(method or "").lower().replace("compressed_tensors", "compressed-tensors")
