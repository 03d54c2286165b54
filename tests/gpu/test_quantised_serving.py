"""Quantised drafts on a real server with graphs: they draft well, and take new weights. They need a GPU."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_sglang.demo.server import Server
from tests.engine.test_weight_update import update_draft
from tests.support.engines import serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from training.calibrate import Inputs, read_inputs
from training.pair import held_out_prompts
from training.quantise import quantise_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROMPTS = [list(text.encode()) for text in held_out_prompts()[:12]]
NEW_TOKENS = 64
SERVED = {
    "ct-w4a16": "per_layer (layers.0.self_attn.qkv_proj is served by CompressedTensorsWNA16",
    "fp8-static": "sliced (Fp8LinearMethod",
}


@pytest.fixture(scope="module")
def calibration() -> dict[str, Inputs]:
    return read_inputs(DRAFT)


def decode(server: Server) -> tuple[list[list[int]], float]:
    """(outputs, new tokens per verify step) of the prompts one by one, on an empty cache."""
    server.post("/flush_cache?timeout=60")
    sampling = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    answers = [server.generate(input_ids=prompt, sampling_params=sampling) for prompt in PROMPTS]
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    return [answer["output_ids"] for answer in answers], len(PROMPTS) * (NEW_TOKENS - 1) / steps


@pytest.mark.parametrize("scheme", SERVED)
def test_a_served_quantised_draft_keeps_its_accept_length_and_takes_new_weights(tmp_path, scheme, calibration):
    trained = quantise_checkpoint(scheme, tmp_path / "trained", DRAFT, calibration)
    flipped = {
        name: tensor.flip(0).contiguous() for name, tensor in load_file(DRAFT / "model.safetensors").items()
    }
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text((DRAFT / "config.json").read_text())
    save_file(flipped, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    other = quantise_checkpoint(scheme, tmp_path / "unrelated", tmp_path / "other", calibration)
    environment = {**DEVICE_ENVIRONMENT, "DFLASH_SGLANG_REQUIRE": "1"}
    flags = dict(cuda_graph_max_bs_decode=4, **ON_DEVICE)
    with serve(TARGET, trained, environment=environment, **flags) as server:
        assert f"dflash_sglang context KV: {SERVED[scheme]}" in server.log_text()
        outputs, accepted = decode(server)
        assert accepted > 4
        update_draft(server, load_file(other / "model.safetensors"))
        _, of_unrelated = decode(server)
        assert of_unrelated < accepted / 2
        update_draft(server, load_file(trained / "model.safetensors"))
        assert decode(server) == (outputs, accepted), "block and context KV have the new weights, both"
    print(scheme, accepted, of_unrelated, torch.cuda.get_device_name())
