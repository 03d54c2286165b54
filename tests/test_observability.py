"""What the log says of memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import nn

from tests import sglang_layers as layers

SLOTS = 200_000


def test_the_memory_line_counts_the_drafts_weights_its_copies_and_its_pool_once(tmp_path: Path) -> None:
    from dflash_sglang.models.context_kv import ContextKV
    from dflash_sglang.models.fp8_head import Fp8Head
    from dflash_sglang.models.hot_rows import HotRows
    from dflash_sglang.observability import GB, memory_line

    layers.start_rank()
    model = layers.make_draft(tmp_path, hidden_size=512, intermediate_size=4096)
    ContextKV(model)  # stacks K and V rows: the layers' weights become slices
    pool = layers.make_pool(model, slots=SLOTS)
    runner = SimpleNamespace(token_to_kv_pool=pool, graph_memory_usage={"target_verify": 0.25, "decode": 0.5})
    head, kept = nn.Linear(512, 5000, bias=False), torch.arange(3000)
    line = memory_line(runner, model, HotRows(head, kept))
    in_fp8 = memory_line(runner, model, Fp8Head(head, kept))
    held = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    weights, kv = (float(part.split()[0]) for part in (line.partition("weights ")[2], line.partition("KV ")[2]))
    assert abs(weights - (held + 3000 * 512 * 4) / GB) < 0.002  # and tables of positions
    saved = weights - float(in_fp8.partition("weights ")[2].split()[0])
    assert abs(saved - 3000 * 512 * 3 / GB) < 0.0012
    attention = model.layers[0].self_attn
    per_token = 2 * len(model.layers) * attention.num_kv_heads * attention.head_dim * 4
    assert abs(kv - (SLOTS + 1) * per_token / GB) < 0.0006
    assert line.endswith(f"GB for {SLOTS} tokens, graphs of whole blocks 0.750 GB")
