"""Targets with multi-head latent attention."""

from __future__ import annotations

from typing import Any

from tests.zoo.member import TEXT, Member, register


def deepseek_v3() -> Any:
    """Latent attention with YaRN, grouped sigmoid routing, shared experts."""
    from transformers import DeepseekV3Config

    text = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
    return DeepseekV3Config(
        **text,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=8.0,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=128,
        ),
    )


register(Member("DeepSeek-V3", "DeepseekV3ForCausalLM", deepseek_v3))
