"""What the log says of a draft's config and of memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.in_words import layers_read, rope_read
from tests.support import sglang_layers as layers
from tests.support.tiny import draft_config

SLOTS = 200_000
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0}


SAID: list[tuple[dict[str, Any], str, str]] = [
    ({}, "0 sliding(16) causal, 1 full not causal", "theta 10000, 16 of 16 dimensions"),
    ({"num_hidden_layers": 6, "layer_types": [SLIDING] * 3 + [FULL, SLIDING, SLIDING], "is_causal": False},
     "0-2 sliding(16) not causal, 3 full not causal, 4-5 sliding(16) not causal",
     "theta 10000, 16 of 16 dimensions"),
    ({"layer_types": [FULL, FULL], "is_causal": True, "rope_theta": 1e7, "partial_rotary_factor": 0.5},
     "0-1 full causal", "theta 10000000, 8 of 16 dimensions"),
    ({"rope_scaling": YARN, "is_neox_style": False}, "0 sliding(16) causal, 1 full not causal",
     "theta 10000, 16 of 16 dimensions, interleaved, yarn factor 64.0 original_max_position_embeddings 4096 "
     "mscale 1.0"),
]  # fmt: skip


def test_the_start_up_line_shows_what_was_read_of_every_layer() -> None:
    for fields, *said in SAID:
        spec = DraftSpec.from_config(draft_config(**fields))
        assert [layers_read(spec), rope_read(spec)] == said


def test_the_memory_line_counts_the_drafts_weights_its_copies_and_its_pool_once(tmp_path: Path) -> None:
    from dflash_sglang.assembly.lines import GB, memory_line
    from dflash_sglang.drafting.step_slots import StepSlots
    from dflash_sglang.models.context_kv.projection import ContextKV
    from dflash_sglang.models.head.copies import HotRows
    from dflash_sglang.verify.adjustments import Adjustments
    from dflash_sglang.verify.tables import Tables

    layers.start_rank()
    tables = Tables.taken(StepSlots(rows := 101, 16, "cpu"), Adjustments(rows, 16, 32000, "cpu"))
    counted = rows * (5 * 32000 + 17 * 8 + 5 * (16 + 2) * 8 + 5 * 4 + 2 * 8 + 4)
    counted += 5 * 4 * (rows * 17 + 128)  # what the draft thought of rows, and of trees' nodes
    model = layers.make_draft(tmp_path, hidden_size=512, intermediate_size=4096)
    ContextKV(model)  # stacks K and V rows: the layers' weights become slices
    pool = layers.make_pool(model, slots=SLOTS)
    runner = SimpleNamespace(token_to_kv_pool=pool, graph_memory_usage={"target_verify": 0.25, "decode": 0.5})
    head, kept = nn.Linear(512, 5000, bias=False), torch.arange(3000)

    def said(head_copy: HotRows, copies: Any = None) -> str:
        borrowed = SimpleNamespace(head_copy=head_copy)
        draft = SimpleNamespace(
            runner=runner, model=model, borrowed=borrowed, rings="a layer sees all", swa_window=0
        )
        return memory_line(draft, tables, copies)

    line = said(HotRows(head, kept))
    held = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    weights, kv = (float(part.split()[0]) for part in (line.partition("weights ")[2], line.partition("KV ")[2]))
    assert abs(weights - (held + 3000 * 512 * 4) / GB) < 0.002  # and tables of positions
    attention = model.layers[0].self_attn
    per_token = 2 * len(model.layers) * attention.num_kv_heads * attention.head_dim * 4
    assert abs(kv - (SLOTS + 1) * per_token / GB) < 0.0006
    assert abs(tables.nbytes - counted) < 100
    of_tables = f"tables {tables.nbytes / GB:.3f} GB for 100 requests"
    assert line.endswith(f"GB for {SLOTS} tokens, {of_tables}, graphs of whole blocks 0.750 GB")
    with_copies = said(HotRows(head, kept), SimpleNamespace(nbytes=GB // 4))
    assert with_copies.endswith(f"{of_tables}, copies 0.250 GB, graphs of whole blocks 0.750 GB")
