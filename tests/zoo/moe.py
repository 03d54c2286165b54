"""Mixture-of-experts targets."""

from __future__ import annotations

from typing import Any

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
