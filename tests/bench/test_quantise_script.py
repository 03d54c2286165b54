"""The quantisation script: real checkpoint layouts, read back by readers that share nothing with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.quantised_layouts import dequantised
from tests.support.tiny import draft_config, draft_tensors, write_checkpoint
from training.calibrate import Inputs
from training.quantise import GROUP_SIZE, SCHEMES, quantise, quantise_checkpoint

CONFIG = draft_config(hidden_size=128, head_dim=32, intermediate_size=256)
WEIGHTS = {name: tensor.bfloat16() for name, tensor in draft_tensors(CONFIG).items()}
MATRICES = [name for name, tensor in WEIGHTS.items() if tensor.ndim == 2]
# Relative error of round-to-nearest: half a step of the levels that a matrix, row or group of normal weights has.
ERROR = {"fp8-dynamic": 0.03, "ct-w8a8-int8": 0.012, "ct-w4a16": 0.1}


def calibration() -> dict[str, Inputs]:
    """As if every layer had read 4000 rows."""
    generator = torch.Generator().manual_seed(0)
    read = {}
    for name in MATRICES:
        inputs = WEIGHTS[name].shape[1]
        rows = torch.randn(4000, inputs, generator=generator)
        read[name.removesuffix(".weight")] = Inputs(float(rows.abs().max()), rows.T @ rows)
    return read


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_independent_reader_gets_the_weights_back_to_within_the_rounding(scheme):
    read = calibration()
    if SCHEMES[scheme].static:
        with pytest.raises(ValueError, match="static activation scales: expected a calibration"):
            quantise(WEIGHTS, SCHEMES[scheme])
    tensors = quantise(WEIGHTS, SCHEMES[scheme], read if SCHEMES[scheme].static else None)
    if "fc.input_scale" in tensors:
        assert float(tensors["fc.input_scale"]) == pytest.approx(read["fc"].largest / 448)
    back = dequantised(tensors, SCHEMES[scheme].config)
    assert back.keys() == WEIGHTS.keys()
    limit = ERROR["fp8-dynamic" if "fp8" in scheme else "ct-w8a8-int8" if "int8" in scheme else "ct-w4a16"]
    for name, weight in WEIGHTS.items():
        if weight.ndim == 1:
            assert torch.equal(tensors[name], weight)
        else:
            error = (back[name] - weight.float()).norm() / weight.float().norm()
            assert limit / 6 < error < limit, name


@pytest.mark.parametrize("scheme", ["ct-w4a16", "ct-w4a16-asym"])
def test_the_library_of_the_format_unpacks_the_same_levels(scheme):
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    tensors = quantise(WEIGHTS, SCHEMES[scheme])
    own = {n.removeprefix("fc."): t for n, t in tensors.items() if n.startswith("fc.")}
    levels = unpack_from_int32(own["weight_packed"], 4, torch.Size(own["weight_shape"].tolist())).float()
    zeros = torch.zeros(own["weight_scale"].shape)
    if "weight_zero_point" in own:
        zeros = unpack_from_int32(own["weight_zero_point"], 4, own["weight_scale"].shape, packed_dim=0).float()
    matrix = (levels - zeros.repeat_interleave(GROUP_SIZE, 1)) * own["weight_scale"].float().repeat_interleave(
        GROUP_SIZE, 1
    )
    assert torch.equal(matrix, dequantised(tensors, SCHEMES[scheme].config)["fc.weight"])


def test_a_checkpoint_is_written_whole(tmp_path: Path):
    source = write_checkpoint(tmp_path / "draft", CONFIG, WEIGHTS)
    out = quantise_checkpoint("awq", tmp_path / "awq", source)
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "awq"
    assert config == json.loads((source / "config.json").read_text())
    written = load_file(out / "model.safetensors")
    assert written["layers.0.self_attn.k_proj.qweight"].shape == (128, 64 // 8)
    assert {name for name in written if name.endswith("norm.weight")} == {n for n in WEIGHTS if "norm" in n}
