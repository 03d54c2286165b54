"""Kernel launches that context KV takes for one verify step, counted on this GPU.

python -m bench.launches DRAFT

Prints one JSON object: the launches of projection and write (`fc` and the norm of the context rows, which every
draft has, are not among them), the draft's layers, and how the rows were projected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.layers.quantization import fp8_utils, get_quantization_config
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.test.layer_ut_utils import init_single_process_dist
from torch.profiler import ProfilerActivity, profile

from bench.eager_exec import eager_exec
from dflash_sglang.demo.server import free_port
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.models.draft import DFlashDraftModel
from training.quantise import SGLANG_METHODS

DEVICE = "cuda"


def load(directory: Path) -> DFlashDraftModel:
    """The draft on SGLang's layers in bfloat16, loaded and processed."""
    raw = json.loads((directory / "config.json").read_text()).get("quantization_config")
    config = None
    if raw is not None:
        method = SGLANG_METHODS.get(raw["quant_method"], raw["quant_method"])
        packed = DFlashDraftModel.packed_modules_mapping
        config = get_quantization_config(method).from_config({**raw, "packed_modules_mapping": packed})
        config.apply_weight_name_mapper(DFlashDraftModel.hf_to_sglang_mapper)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = DFlashDraftModel(SimpleNamespace(_name_or_path=str(directory)), config)
    model.load_weights(load_file(directory / "model.safetensors").items())
    model.to(DEVICE)
    for module in model.modules():
        if getattr(module, "quant_method", None) is not None:
            module.quant_method.process_weights_after_loading(module)
    return model


def count(directory: Path) -> dict[str, Any]:
    model = load(directory)
    attention, block = model.layers[0].self_attn, model.spec.block_size
    pool = MHATokenToKVPool(
        size=4 * block,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=attention.num_kv_heads,
        head_dim=attention.head_dim,
        layer_num=len(model.layers),
        device=DEVICE,
        enable_memory_saver=False,
    )
    context = ContextKV(model)
    context.bind(pool)
    features = torch.randn(block, model.num_features * model.spec.hidden_size, device=DEVICE).bfloat16()
    positions = torch.arange(block, device=DEVICE)
    shared = launches(lambda: context.project(features))
    names = launches(lambda: context.write(features, positions, positions + 1))[len(shared) :]
    return {"launches": len(names), "layers": len(model.layers), "context_kv": context.reason, "kernels": names}


def launches(run: Callable[[], object]) -> list[str]:
    """Names of what `run` started on the GPU, its third time: a first profile may miss some."""
    run()
    for _ in range(2):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            run()
            torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def main() -> None:
    fp8_utils.get_exec = eager_exec
    init_single_process_dist(master_port=free_port())
    print(json.dumps(count(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
