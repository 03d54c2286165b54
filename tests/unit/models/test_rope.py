"""RoPE of drafts at long contexts: every scaling as transformers computes it, tables as long as the context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.utils import common
from torch import Tensor

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from tests.support import sglang_layers as layers
from tests.support.tiny import draft_config

TRAINED = 64  # positions
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": TRAINED}  # fmt: skip
BESIDE = "of the config"  # fields beside the scaling
SCALINGS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4},
    "linear by a fraction": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn of a given magnitude": {**YARN, "attention_factor": 0.8},
    "yarn of a given magnitude beside others": {**YARN, "attention_factor": 0.8, "mscale": 2, "mscale_all_dim": 1},
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6},
    "yarn with half of mscale": {**YARN, "mscale": 2.0, "mscale_all_dim": 0},
    "yarn of given bounds": {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False},
    "yarn with both of mscale at 1": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn of half a head": {**YARN, BESIDE: {"partial_rotary_factor": 0.5}},
    "llama3 of no trained length": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"},
    "yarn whose factor is null": {**YARN, "factor": None, "original_max_position_embeddings": TRAINED // 4},
    "yarn of a trained length beside it": {**YARN, BESIDE: {"original_max_position_embeddings": TRAINED // 2}},
}


def fields(scaling: dict[str, Any]) -> dict[str, Any]:
    """Of a config with this scaling."""
    inside = {"rope_theta": 10000.0, **{key: value for key, value in scaling.items() if key != BESIDE}}
    return dict(max_position_embeddings=TRAINED, rope_parameters=inside, **scaling.get(BESIDE, {}))


def as_transformers_does(scaling: dict[str, Any], positions: Tensor, x: Tensor) -> Tensor:
    """x [T, heads * 16] rotated by transformers' Qwen3."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = Qwen3Config(**sizes, **fields(scaling))
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions[None])
    width = cos.shape[-1]
    heads = x.view(1, len(positions), -1, 16).transpose(1, 2)
    rotated, _ = apply_rotary_pos_emb(heads[..., :width], heads[..., :width], cos, sin)
    return torch.cat((rotated, heads[..., width:]), dim=-1).transpose(1, 2).reshape(x.shape)


@layers.cpu_only
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS.keys())
def test_keys_and_queries_of_every_scaling_equal_transformers_far_beyond_the_trained_length(
    tmp_path, scaling, monkeypatch
):
    """SGLang's model runner makes the tables as long as the target's context, once the weights are loaded."""
    monkeypatch.setattr(common, "get_model", lambda: SimpleNamespace(context_length=None))
    spec = SimpleNamespace(speculative_num_steps=None, speculative_num_draft_tokens=None)
    monkeypatch.setattr(common, "get_spec", lambda: spec)
    model = layers.make_draft(tmp_path, **fields(scaling))
    common.reserve_rope_cache_for_long_sequences(model, SimpleNamespace(context_len=9000))
    attention = model.layers[1].self_attn
    positions = torch.cat((torch.arange(4 * TRAINED), torch.tensor([1000, 8999])))
    generator = torch.Generator().manual_seed(2)
    k, q = torch.randn(2, len(positions), attention.kv_size, generator=generator)
    with torch.no_grad():
        normed = attention.k_norm(k.reshape(-1, 16)).view(k.shape)
        keys = attention.finished_keys(k.clone(), positions)
        queries, _ = attention.rotary_emb(positions, q.clone(), q.clone())
    torch.testing.assert_close(keys, as_transformers_does(scaling, positions, normed), rtol=0, atol=2e-3)
    torch.testing.assert_close(queries, as_transformers_does(scaling, positions, q), rtol=0, atol=2e-3)


def test_theta_of_rope_scaling_wins_over_that_of_equal_rope_parameters():
    from transformers import Qwen3Config

    for other in ({}, {"rope_theta": 3.0}):
        config = draft_config(rope_parameters={**LLAMA3, **other}, rope_scaling={**LLAMA3, "rope_theta": 77.0})
        theirs = Qwen3Config(**config).rope_parameters["rope_theta"]
        assert DraftSpec.from_config(config).rope.theta == theirs == 77.0


@pytest.mark.matrix(draft="z-lab, RoPE of the sequence's length", outcome="refused")
def test_a_scaling_that_cannot_be_served_is_an_error_that_names_it():
    for scaling, field, value, expected in (
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type", "dynamic", "stay as a sequence grows"),
        ({"type": "longrope", "long_factor": [1.0]}, "rope_type", "longrope", "stay as a sequence grows"),
        ({"rope_type": "xpos"}, "rope_type", "xpos", "one of default, linear, yarn, llama3"),
        ({"rope_type": "linear"}, "factor", None, "a positive number"),
        ({"rope_type": "yarn", "factor": 0}, "factor", 0, "a positive number"),
        ({**LLAMA3, "high_freq_factor": None}, "high_freq_factor", None, "a positive number"),
    ):
        with pytest.raises(DraftConfigError) as refused:
            DraftSpec.from_config(draft_config(rope_scaling=scaling))
        assert (refused.value.field, refused.value.value) == (f"rope_scaling.{field}", value)
        assert expected in str(refused.value)
