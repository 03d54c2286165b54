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
