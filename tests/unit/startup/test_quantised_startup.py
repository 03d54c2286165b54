"""Quantised drafts that cannot be served are refused before anything is loaded, each with what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.startup.quantisation_checks import FLAG, quantisation_problems
from tests.support.start_up import change, launch, refusal
from tests.support.tiny import make_pair
from training.quantise import SCHEMES

CT = SCHEMES["ct-w4a16"].config
NVFP4 = SCHEMES["nvfp4-a16"].config


def problems(
    quantisation: Any, asked: str | None = None, device: str = "cuda", bias: bool = False, **found: Any
) -> list[str]:
    config: dict[str, Any] = {"attention_bias": bias}
    if quantisation is not None:
        config["quantization_config"] = quantisation
    return [str(problem) for problem in quantisation_problems(config, asked, device, **found)]


def group(changed: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """The W4A16 config with fields of its group, and of the group's weights, changed."""
    old = CT["config_groups"]["group_0"]
    new = {**old, **changed, "weights": {**old["weights"], **weights}}
    return {**CT, "config_groups": {"group_0": new}}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_of_the_quantisation_script_is_served_on_a_gpu(scheme: str) -> None:
    assert problems(SCHEMES[scheme].config) == []


def test_a_dense_draft_may_be_quantised_while_loading() -> None:
    assert problems(None) == problems(None, "fp8") == problems(None, "fp8", inherited=True) == []


@pytest.mark.parametrize("config", [{"quant_method": "modelopt"}, {}, {"quant_method": "modelopt_fp8"}], ids=str)
def test_modelopts_fp8_is_known_by_the_names_that_it_is_published_under(config: dict[str, str]) -> None:
    assert problems({**config, "quant_algo": "FP8"}) == []


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4"])
@pytest.mark.parametrize("config", [{"quant_method": "modelopt"}, {}, {"quant_method": "modelopt_fp4"}], ids=str)
def test_modelopts_nvfp4_is_known_by_the_names_that_it_is_published_under(
    config: dict[str, str], algorithm: str
) -> None:
    assert problems({**config, "quant_algo": algorithm, "group_size": 16}, capability=(8, 0)) == []


@pytest.mark.matrix(
    draft="NVFP4, a GPU before Ampere",
    kv="model dtype",
    outcome="refused",
    message="draft config quantization_config.quant_algo='W4A16_NVFP4': expected a GPU of compute capability 8.0",
)
def test_a_gpu_without_a_kernel_of_nvfp4_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    draft = make_pair(tmp_path)[1]
    launch(change(draft, {"quantization_config": dict(SCHEMES["awq"].config)}, {}), device="cuda")
    change(draft, {"quantization_config": None}, {})
    said = refusal(change(draft, {"quantization_config": dict(NVFP4)}, {}), device="cuda")
    expected = "expected a GPU of compute capability 8.0 or more, and this one has 7.5."
    assert said.startswith(f"{FIELD}.quant_algo='W4A16_NVFP4': {expected}")


@pytest.mark.matrix(
    draft="NVFP4 with biases",
    kv="model dtype",
    outcome="refused",
    message="draft config attention_bias=True: expected false beside W4A16_NVFP4",
)
def test_biases_beside_nvfp4_are_refused() -> None:
    (problem,) = problems(NVFP4, bias=True)
    assert problem.startswith("draft config attention_bias=True: expected false beside W4A16_NVFP4")
    assert problems(SCHEMES["awq"].config, bias=True) == []


FIELD = "draft config quantization_config"
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "GGUF": ({"quant_method": "gguf"}, [f"{FIELD}.quant_method='gguf'", "fp8, compressed-tensors, awq, gptq"]),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, [f"{FIELD}.quant_method='bitsandbytes'", "in bf16"]),
    "an unknown method": ({"quant_method": "hqq"}, [f"{FIELD}.quant_method='hqq'", "training/quantise.py"]),
    "a config without a method": ({"bits": 4}, [f"{FIELD}.quant_method=None"]),
    "NVFP4": (
        group({"format": "nvfp4-pack-quantized"}, type="float"),
        [f"{FIELD}.config_groups.group_0.format='nvfp4-pack-quantized'", "pack-quantized"],
    ),
    "ModelOpt FP4 without an algorithm": (
        {"quant_method": "modelopt_fp4"},
        [f"{FIELD}.quant_algo=None", "one of W4A16_NVFP4, NVFP4"],
    ),
    "ModelOpt NVFP4 with AWQ's scales of inputs": (
        {**NVFP4, "quant_algo": "NVFP4_AWQ"},
        [f"{FIELD}.quant_algo='NVFP4_AWQ'", "one of FP8, W4A16_NVFP4, NVFP4"],
    ),
    "ModelOpt's mixed precision": (
        {"quant_algo": "MIXED_PRECISION"},
        [f"{FIELD}.quant_algo='MIXED_PRECISION'", "one of FP8, W4A16_NVFP4, NVFP4"],
    ),
    "ModelOpt NVFP4 in groups of 32": ({**NVFP4, "group_size": 32}, [f"{FIELD}.group_size=32", "NVFP4's groups"]),
    "a list of groups": (
        {**CT, "config_groups": [{"weights": {}}]},
        [f"{FIELD}.config_groups=[", "an object with a group of layers by name"],
    ),
    "a group that is none": (
        {**CT, "config_groups": {"group_0": {"weights": 4}}},
        [f"{FIELD}.config_groups.group_0={{'weights': 4}}"],
    ),
    "W4A16 in groups of 16": (
        group({}, group_size=16),
        [f"{FIELD}.config_groups.group_0.weights.group_size=16", "32, 64, 128"],
    ),
    "W8A16 with zero points": (
        group({}, num_bits=8, symmetric=False),
        ["'8-bit int, asymmetric'", "symmetric int8"],
    ),
    "W3A16": (group({}, num_bits=3), [".weights='3-bit int, symmetric'", "int4"]),
    "int8 with one scale per matrix": (
        group({"format": "int-quantized"}, num_bits=8, strategy="tensor"),
        [".weights.strategy='tensor'", "channel"],
    ),
    "AWQ in GEMV's layout": ({**SCHEMES["awq"].config, "version": "gemv"}, [f"{FIELD}.version='gemv'", "gemm"]),
    "AWQ without zero points": ({**SCHEMES["awq"].config, "zero_point": False}, [f"{FIELD}.zero_point=False"]),
    "asymmetric GPTQ": ({**SCHEMES["gptq"].config, "sym": False}, [f"{FIELD}.sym=False", "True"]),
    "3-bit GPTQ": ({**SCHEMES["gptq"].config, "bits": 3}, [f"{FIELD}.bits=3", "4, 8"]),
    "GPTQ in Marlin's layout": (
        {**SCHEMES["gptq"].config, "checkpoint_format": "marlin"},
        [f"{FIELD}.checkpoint_format='marlin'", "gptq_v2"],
    ),
}


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        pytest.param(
            *row,
            id=name,
            marks=pytest.mark.matrix(target="any", draft=name, kv="model dtype", outcome="refused"),
        )
        for name, row in REFUSED.items()
    ],
)
def test_a_quantisation_that_cannot_be_served_is_refused(quantisation: Any, expected: list[str]) -> None:
    (problem,) = problems(quantisation)
    for part in expected:
        assert part in problem


@pytest.mark.matrix(
    target="any, on a CPU",
    draft="quantised",
    kv="model dtype",
    outcome="refused",
    message="draft config quantization_config=...: expected an unquantised draft on --device cpu",
)
def test_quantised_weights_need_a_gpu() -> None:
    (problem,) = problems(SCHEMES["awq"].config, device="cpu")
    assert f"{FIELD}='awq'" in problem and "need a CUDA GPU" in problem
    (problem,) = problems(None, "fp8", device="cpu")
    assert problem.startswith(f"{FLAG}='fp8'") and f"Set {FLAG} unquant" in problem


@pytest.mark.parametrize(
    "method", ["awq", "compressed-tensors", "quark", "auto-round", "bitsandbytes", "gguf", "mxfp4", "w4afp8"]
)
@pytest.mark.parametrize(("inherited", "field"), [(False, FLAG), (True, "--quantization")])
def test_a_method_that_only_reads_checkpoints_is_no_flag_for_a_dense_draft(
    method: str, inherited: bool, field: str
) -> None:
    (problem,) = problems(None, method, inherited=inherited)
    assert problem.startswith(f"{field}={method!r}: expected a quantised draft checkpoint")
    assert f"Set {FLAG} unquant, or fp8" in problem


def test_a_method_that_sglang_looks_up_in_a_file_is_no_flag_for_a_dense_draft() -> None:
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    looked_up = {name for name, method in QUANTIZATION_METHODS.items() if method.get_config_filenames()}
    assert {name for name in looked_up if not problems(None, name)} == {"modelopt_fp4"}  # it leaves a draft dense


def test_a_modelopt_draft_may_be_described_in_a_file_of_its_own(tmp_path: Path) -> None:
    draft = make_pair(tmp_path)[1]
    flags = dict(device="cuda", speculative_draft_model_quantization="modelopt_fp8")
    assert refusal(draft, **flags).startswith("--quantization='modelopt_fp8': expected a quantised draft")
    (draft / "hf_quant_config.json").write_text("{}")
    launch(draft, **flags)
