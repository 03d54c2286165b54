"""LoRA on the target: two adapters and none in one batch, each as without speculation.

SGLang's LoRA kernels need a GPU. `test_disaggregated` has adapters on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_sglang.demo.server import Server
from tests.support.engines import serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from training.pair import held_out_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROMPTS = [list(text.encode()) for text in held_out_prompts()[:6]]
ADAPTERS = ["first", None, "second", "first", "second", None]
RANK = 8


def adapter(directory: Path, seed: int, scale: float) -> Path:
    """A PEFT adapter of every attention projection of the target."""
    config = json.loads((TARGET / "config.json").read_text())
    hidden, dim = config["hidden_size"], config["head_dim"]
    widths = {
        "q_proj": (hidden, config["num_attention_heads"] * dim),
        "k_proj": (hidden, config["num_key_value_heads"] * dim),
        "v_proj": (hidden, config["num_key_value_heads"] * dim),
        "o_proj": (config["num_attention_heads"] * dim, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (width_in, width_out) in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, width_in, generator=generator) * width_in**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width_out, RANK, generator=generator) * scale
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = dict(peft_type="LORA", r=RANK, lora_alpha=RANK, target_modules=list(widths), bias="none")
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def decode(server: Server) -> list[list[int]]:
    sampling = dict(temperature=0, max_new_tokens=40, ignore_eos=True)
    answers = server.generate(input_ids=PROMPTS, lora_path=ADAPTERS, sampling_params=sampling)
    return [answer["output_ids"] for answer in answers]


def test_adapters_in_one_batch_act_as_without_speculation(tmp_path):
    first, second = adapter(tmp_path / "first", 1, 0.02), adapter(tmp_path / "second", 2, 0.03)
    flags = dict(
        enable_lora=True,
        lora_paths=[f"first={first}", f"second={second}"],
        max_loras_per_batch=3,
        cuda_graph_max_bs_decode=8,
        **ON_DEVICE,
    )
    with serve(TARGET, environment=DEVICE_ENVIRONMENT, **flags) as plain:
        expected = decode(plain)
        without = plain.generate(
            input_ids=PROMPTS, sampling_params=dict(temperature=0, max_new_tokens=40, ignore_eos=True)
        )
    changed = [out != answer["output_ids"] for out, answer in zip(expected, without, strict=True)]
    assert changed == [name is not None for name in ADAPTERS]
    with serve(TARGET, DRAFT, environment={**DEVICE_ENVIRONMENT, "DFLASH_SGLANG_REQUIRE": "1"}, **flags) as server:
        assert decode(server) == expected
