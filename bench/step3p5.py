"""config.json of a Step-3.5 target with multi-token-prediction (MTP) layers, in the hub's form, of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MTP_LAYERS = 3
FULL, SLIDING = "full_attention", "sliding_attention"
# Not in the hub's file. Without it, SGLang 0.5.23 reads one `num_attention_heads` of the config that transformers
# makes of this one, and fails: the number varies among layers.
FOR_SGLANG: Mapping[str, Any] = {"per_layer_config": {}}


def hub_config(
    types: Sequence[str],
    heads: Mapping[str, int],
    sparse: Sequence[int],
    rope_base: float,
    rope_scaling: Mapping[str, float],
    **sizes: Any,
) -> dict[str, Any]:
    """A config whose lists by layer cover the MTP layers.

    types: `FULL` or `SLIDING`, of the target's layers, then of the MTP layers. heads: query heads of each type.
    sparse: layers with experts. rope_base, rope_scaling: of full layers, whose scaling is llama3's.
    sizes: all other fields, under the hub's names; num_attention_groups are KV heads.
    """
    return dict(
        architectures=["Step3p5ForCausalLM"],
        model_type="step3p5",
        num_hidden_layers=len(types) - MTP_LAYERS,
        num_nextn_predict_layers=MTP_LAYERS,
        num_attention_heads=heads[FULL],
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        layer_types=list(types),
        attention_other_setting=dict(
            attention_type=SLIDING,
            num_attention_heads=heads[SLIDING],
            num_attention_groups=sizes["num_attention_groups"],
            head_dim=sizes["head_dim"],
        ),
        use_head_wise_attn_gate=True,
        rope_theta=[rope_base if kind == FULL else 10000.0 for kind in types],
        partial_rotary_factors=[0.5 if kind == FULL else 1.0 for kind in types],
        rope_scaling=dict(rope_type="llama3", low_freq_factor=1.0, **rope_scaling),
        yarn_only_types=[FULL],
        moe_layers_enum=",".join(map(str, sparse)),
        use_moe_router_bias=True,
        need_fp32_gate=True,
        norm_expert_weight=True,
        swiglu_limits=[0.0] * len(types),
        **sizes,
    )
