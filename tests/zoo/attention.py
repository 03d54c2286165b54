"""Targets whose layers all attend: dense, with latents, with experts, and in front of them a vision tower."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tests.zoo import processors
from tests.zoo.member import TEXT, Member, config, register, wrapped

FULL, SLIDING = "full_attention", "sliding_attention"
TIED = dict(tie_word_embeddings=True)
EXPERTS = dict(moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
IN_TURN = dict(sliding_window=24, layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING])

# Llama 3.1's scaling, in reach of short prompts.
LLAMA = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA |= dict(original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=128)

register(
    Member("Qwen3", "Qwen3ForCausalLM", config("Qwen3Config")),
    Member("Qwen2", "Qwen2ForCausalLM", config("Qwen2Config", "head_dim")),
    Member("Llama 3.1", "LlamaForCausalLM", config("LlamaConfig", rope_parameters=LLAMA)),
    Member(  # a vocabulary that SGLang pads
        "Llama 3.1, tied", "LlamaForCausalLM", config("LlamaConfig", rope_parameters=LLAMA, vocab_size=300, **TIED)
    ),
    Member(
        "Gemma 2",
        "Gemma2ForCausalLM",
        config("Gemma2Config", hidden_act="gelu_pytorch_tanh", **TIED),
        refused="target config architectures=['Gemma2ForCausalLM']: expected a target whose class in SGLang has "
        "set_dflash_layers_to_capture or set_eagle3_layers_to_capture, which feed the draft. Serve it without "
        "--speculative-algorithm DFLASH.",
    ),
    Member(
        "Gemma 3", "Gemma3ForCausalLM", config("Gemma3TextConfig", query_pre_attn_scalar=16, **IN_TURN, **TIED)
    ),
    Member(  # latent attention with YaRN, grouped sigmoid routing, shared experts
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        config(
            "DeepseekV3Config",
            "head_dim",
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
            rope_parameters=dict(YARN, rope_theta=10000.0, factor=8.0, mscale=1.0, mscale_all_dim=1.0),
        ),  # fmt: skip
    ),
    Member("Qwen3-MoE", "Qwen3MoeForCausalLM", config("Qwen3MoeConfig", norm_topk_prob=True, **EXPERTS)),
)


def keep_sinks_in_bfloat16(model: Any) -> None:
    """SGLang holds gpt-oss's sinks in bfloat16."""
    for layer in model.model.layers:
        layer.self_attn.sinks.copy_(layer.self_attn.sinks.bfloat16())


register(
    Member(  # attention sinks, clamped activations, sliding layers whose KV lives in a pool of its own
        "gpt-oss",
        "GptOssForCausalLM",
        config(
            "GptOssConfig",
            num_local_experts=4,
            num_experts_per_tok=2,
            **IN_TURN,
            rope_parameters=dict(YARN, rope_theta=150000.0, factor=32.0, truncate=False),
        ),  # fmt: skip
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
    sliding, sparse, window = [0, 1, 1, 0, 1], [0, 1, 1, 1, 1], 24
    rotated, theta, sliding_theta = 0.5, 500000.0, 10000.0
    rope = dict(rope_type="default", partial_rotary_factor=rotated)
    of_layers = dict(
        full_attention=dict(rope, rope_theta=theta), sliding_attention=dict(rope, rope_theta=sliding_theta)
    )
    hub = dict(
        hybrid_layer_pattern=sliding, moe_layer_freq=sparse, sliding_window_size=window - 1,
        swa_num_attention_heads=TEXT["num_attention_heads"], swa_head_dim=TEXT["head_dim"], swa_v_head_dim=12,
        swa_num_key_value_heads=2 * TEXT["num_key_value_heads"], add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False, rope_theta=theta, swa_rope_theta=sliding_theta,
        partial_rotary_factor=rotated, scoring_func="sigmoid", topk_method="noaux_tc", layernorm_epsilon=1e-5,
    )  # fmt: skip
    return config(
        "MiMoV2FlashConfig", v_head_dim=12, sliding_window=window, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=32, layer_types=[(FULL, SLIDING)[i] for i in sliding],
        mlp_layer_types=[("dense", "sparse")[i] for i in sparse],
        rope_parameters=dict(rope_type="default", **of_layers), **hub,
    )()  # fmt: skip


def prefer_some_experts(model: Any) -> None:
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 8))


register(Member("MiMo-V2", "MiMoV2FlashForCausalLM", mimo_v2, finish=prefer_some_experts))

# ---- Behind a vision tower: a text model in a wrapper ----------------------------------------------------------

START, IMAGE, END = (processors.IMAGE_IDS[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
# 60 letters first: chunks of 64 tokens end within the image.
IMAGE_PROMPT = (*(97 + i % 23 for i in range(60)), START, IMAGE, END, *range(90, 110))
PIXTRAL_PROMPT = tuple(token for token in IMAGE_PROMPT if token not in (START, END))


def tower(depth: int, **more: Any) -> dict[str, Any]:
    """Fields of a small vision tower of Qwen's in front of a text model."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=TEXT["hidden_size"])
    return dict(sizes, depth=depth, **more)


def mrope(*section: int, **more: Any) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=10000.0, mrope_section=list(section), **more)


def pixtral(config_class: str, **text: Any) -> Any:
    """Mistral's vision tower before a text model, in a class of SGLang that leaves the forward to the latter."""
    # SGLang has SiLU in this tower, whatever the config says.
    vision = dict(
        model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2, hidden_act="silu",
        num_attention_heads=2, **processors.PIXTRAL,
    )  # fmt: skip
    return wrapped(
        config_class, dict(TEXT, **text), vision, image_token_index=processors.IMAGE_IDS["image_token_id"],
        vision_feature_layer=-1, vision_feature_select_strategy="full", tie_word_embeddings=False,
    )  # fmt: skip


TEXT_OF_QWEN2 = {name: value for name, value in TEXT.items() if name not in ("head_dim", "tie_word_embeddings")}
QWEN3_TOWER = tower(3, deepstack_visual_indexes=[0, 1], num_position_embeddings=64)
PIXTRAL = dict(image_prompt=PIXTRAL_PROMPT, flush_fails=True)

register(
    Member(  # served with text: scaled embeddings, soft-capped logits, full layers of a shape of their own
        "Gemma 4",
        "Gemma4ForConditionalGeneration",
        wrapped(
            "Gemma4Config",
            dict(
                TEXT, global_head_dim=32, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
                num_kv_shared_layers=0, sliding_window=24, layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL],
                final_logit_softcapping=30.0, **TIED,
            ),
            dict(
                hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, head_dim=16, global_head_dim=16,
            ),
            audio_config=None,
        ),
        processor=processors.gemma4,
    ),
    Member(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        wrapped(
            "Qwen2_5_VLConfig", dict(TEXT_OF_QWEN2, rope_parameters=mrope(2, 3, 3)),
            tower(2, fullatt_block_indexes=[1]), **processors.IMAGE_IDS,
        ),
        processor=processors.qwen2_5_vl,
        image_prompt=IMAGE_PROMPT,
    ),
    Member(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        wrapped(
            "Qwen3VLConfig", dict(TEXT, rope_parameters=mrope(4, 2, 2, mrope_interleaved=True)),
            QWEN3_TOWER, **processors.IMAGE_IDS,
        ),
        processor=processors.qwen3_vl,
        image_prompt=IMAGE_PROMPT,
    ),
    Member(
        "Mistral 3",
        "Mistral3ForConditionalGeneration",
        pixtral("Mistral3Config", model_type="mistral", sliding_window=None),
        processor=functools.partial(processors.pixtral, merged=2),
        **PIXTRAL,
    ),
    Member(
        "LLaVA",
        "LlavaForConditionalGeneration",
        pixtral("LlavaConfig", model_type="qwen2"),
        processor=functools.partial(processors.pixtral, merged=1),
        **PIXTRAL,
    ),
)  # fmt: skip
