"""Quantised drafts that cannot be served are refused before anything is loaded, each with what to change."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.startup.quantisation_checks import FLAG, quantisation_problems
from tests.support.start_up import change, launch, refusal, tells
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


def test_what_is_served_on_a_gpu() -> None:
    for scheme in SCHEMES.values():  # of the quantisation script
        assert problems(scheme.config) == []
    # a dense draft may be quantised while it is loaded
    assert problems(None) == problems(None, "fp8") == problems(None, "fp8", inherited=True) == []
    # ModelOpt's formats by the names that they are published under
    for method, algorithm in itertools.product(("modelopt", None), ("FP8", "W4A16_NVFP4", "NVFP4")):
        quantisation = {"quant_method": method, "quant_algo": algorithm, "group_size": 16}
        assert problems(quantisation, capability=(8, 0)) == []


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


FIELD, GROUP = "draft config quantization_config", ".config_groups.group_0"
FIX = "Serve the draft in bf16, or quantise it as one of these (training/quantise.py writes them)."
METHODS = "one of fp8, compressed-tensors, awq, gptq, w8a8_int8, w8a8_fp8"
MODELOPT = "one of FP8, W4A16_NVFP4, NVFP4: what ModelOpt's drafts are served in"
KINDS = "int4, or symmetric int8"
AWQ, GPTQ = SCHEMES["awq"].config, SCHEMES["gptq"].config
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gguf"}, f".quant_method='gguf': expected {METHODS}"),
    ({"bits": 4}, f".quant_method=None: expected {METHODS}"),
    (group({"format": "nvfp4-pack-quantized"}, type="float"), f"{GROUP}.format='nvfp4-pack-quantized': expected "
     "one of float-quantized, int-quantized, pack-quantized, naive-quantized: formats of W8A8 and W4A16 drafts"),
    ({"quant_method": "modelopt_fp4"}, ".quant_algo=None: expected one of W4A16_NVFP4, NVFP4"),
    ({**NVFP4, "quant_algo": "NVFP4_AWQ"}, f".quant_algo='NVFP4_AWQ': expected {MODELOPT}"),
    ({**NVFP4, "group_size": 32}, ".group_size=32: expected one of None, 16: NVFP4's groups"),
    ({**CT, "config_groups": [{}]}, ".config_groups=[{}]: expected an object with a group of layers by name"),
    ({**CT, "config_groups": {"group_0": {"weights": 4}}},
     f"{GROUP}={{'weights': 4}}: expected an object that has one as its weights"),
    (group({}, group_size=16), f"{GROUP}.weights.group_size=16: expected one of None, -1, 32, 64, 128: Marlin's"),
    (group({}, num_bits=8, symmetric=False), f"{GROUP}.weights='8-bit int, asymmetric': expected {KINDS}"),
    (group({}, num_bits=3), f"{GROUP}.weights='3-bit int, symmetric': expected {KINDS}"),
    (group({"format": "int-quantized"}, num_bits=4), f"{GROUP}.weights.num_bits=4: expected one of 8"),
    (group({"format": "int-quantized"}, num_bits=8, strategy="tensor"),
     f"{GROUP}.weights.strategy='tensor': expected one of channel: scales of int8 weights"),
    ({**AWQ, "version": "gemv"}, ".version='gemv': expected one of None, gemm, GEMM: what SGLang's awq kernel"),
    ({**GPTQ, "sym": False}, ".sym=False: expected one of True: what SGLang's gptq kernel reads"),
    ({**GPTQ, "group_size": 16}, ".group_size=16: expected one of None, -1, 32, 64, 128"),
    ({**GPTQ, "checkpoint_format": "marlin"}, ".checkpoint_format='marlin': expected one of None, , gptq,"),
]  # fmt: skip


@pytest.mark.matrix(target="any", draft="quantised as no kernel reads it", kv="model dtype", outcome="refused")
def test_a_quantisation_that_cannot_be_served_is_refused() -> None:
    said = [(problems(quantisation), f"{FIELD}{says} ... {FIX}") for quantisation, says in REFUSED]
    assert [one for one in said if len(one[0]) != 1 or not tells(one[0][0], one[1])] == []


@pytest.mark.matrix(
    target="any, on a CPU",
    draft="quantised",
    kv="model dtype",
    outcome="refused",
    message="draft config quantization_config=...: expected an unquantised draft on --device cpu",
)
def test_quantised_weights_need_a_gpu() -> None:
    for found, expected, fix in (
        (
            problems(AWQ, device="cpu"),
            f"{FIELD}='awq': expected an unquantised draft on --device cpu",
            "a CUDA GPU",
        ),
        (problems(None, "fp8", device="cpu"), f"{FLAG}='fp8': expected", f"Set {FLAG} unquant"),
    ):
        assert len(found) == 1 and found[0].startswith(expected) and fix in found[0]


def test_a_method_that_only_reads_checkpoints_is_no_flag_for_a_dense_draft() -> None:
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    for method, inherited, field in (("awq", False, FLAG), ("bitsandbytes", True, "--quantization")):
        assert problems(None, method, inherited=inherited) == [
            f"{field}={method!r}: expected a quantised draft checkpoint for it, but the draft's config.json "
            f"has no quantization_config. Set {FLAG} unquant, or fp8 to quantise the draft while loading."
        ]
    looked_up = {name for name, method in QUANTIZATION_METHODS.items() if method.get_config_filenames()}
    assert {name for name in looked_up if not problems(None, name)} == {"modelopt_fp4"}  # it leaves a draft dense


def test_a_modelopt_draft_may_be_described_in_a_file_of_its_own(tmp_path: Path) -> None:
    draft = make_pair(tmp_path)[1]
    flags = dict(device="cuda", speculative_draft_model_quantization="modelopt_fp8")
    assert refusal(draft, **flags).startswith("--quantization='modelopt_fp8': expected a quantised draft")
    (draft / "hf_quant_config.json").write_text("{}")
    launch(draft, **flags)
