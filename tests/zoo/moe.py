"""Mixture-of-experts targets."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.member import TEXT, Member, register


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **TEXT,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


register(Member("Qwen3-MoE", "Qwen3MoeForCausalLM", qwen3_moe))


def gpt_oss() -> Any:
    """Attention sinks, clamped activations, sliding layers whose KV lives in a pool of its own."""
    from transformers import GptOssConfig

    return GptOssConfig(
        **TEXT,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        layer_types=[
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=128,
        ),
    )


def keep_sinks_in_bfloat16(model: Any) -> None:
    """SGLang holds gpt-oss's sinks in bfloat16."""
    for layer in model.model.layers:
        layer.self_attn.sinks.copy_(layer.self_attn.sinks.bfloat16())


register(
    Member(
        "gpt-oss",
        "GptOssForCausalLM",
        gpt_oss,
        # Few slots, so that those of the window are used again and are no longer those of the full pool.
        arguments=dict(moe_runner_backend="triton", max_total_tokens=1024, swa_full_tokens_ratio=0.4),
        finish=keep_sinks_in_bfloat16,
    )
)


def mimo_v2() -> Any:
    """Sliding layers with sinks and key and value heads of their own, values scaled and narrower than keys.

    config.json has the fields of the hub's, which SGLang reads, beside those of transformers. The two disagree on
    the window: transformers counts the query's own key, SGLang does not. `rope_type` is not part of the hub's
    file. Without it SGLang 0.5.23 fails: transformers makes two sets of `rope_parameters`, and SGLang takes them
    for a scaling.
    """
    from transformers import MiMoV2FlashConfig

    sliding, sparse, window = [0, 1, 1, 0, 1], [0, 1, 1, 1, 1], 24
    rotated, theta, sliding_theta = 0.5, 500000.0, 10000.0
    rope = dict(rope_type="default", partial_rotary_factor=rotated)
    return MiMoV2FlashConfig(
        **TEXT,
        v_head_dim=12,
        sliding_window=window,
        layer_types=[("full_attention", "sliding_attention")[i] for i in sliding],
        mlp_layer_types=[("dense", "sparse")[i] for i in sparse],
        rope_parameters=dict(
            rope_type="default",
            full_attention=dict(rope, rope_theta=theta),
            sliding_attention=dict(rope, rope_theta=sliding_theta),
        ),
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        # The hub's.
        hybrid_layer_pattern=sliding,
        moe_layer_freq=sparse,
        sliding_window_size=window - 1,
        swa_num_attention_heads=TEXT["num_attention_heads"],
        swa_num_key_value_heads=2 * TEXT["num_key_value_heads"],
        swa_head_dim=TEXT["head_dim"],
        swa_v_head_dim=12,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        rope_theta=theta,
        swa_rope_theta=sliding_theta,
        partial_rotary_factor=rotated,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        layernorm_epsilon=1e-5,
    )


def prefer_some_experts(model: Any) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 8))


register(Member("MiMo-V2", "MiMoV2FlashForCausalLM", mimo_v2, finish=prefer_some_experts))
