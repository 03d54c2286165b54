"""Dense targets."""

from __future__ import annotations

from typing import Any

from tests.zoo import processors
from tests.zoo.member import TEXT, Member, register


def qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**TEXT)


def qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**{key: value for key, value in TEXT.items() if key != "head_dim"})


def llama(tied: bool) -> Any:
    """Llama 3.1: its RoPE scaling, in reach of short prompts; tied, a vocabulary that SGLang pads."""
    from transformers import LlamaConfig

    scaling = dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    changed = dict(tie_word_embeddings=True, vocab_size=300) if tied else {}
    return LlamaConfig(**{**TEXT, **changed}, rope_parameters=scaling)


register(Member("Qwen3", "Qwen3ForCausalLM", qwen3))
register(Member("Qwen2", "Qwen2ForCausalLM", qwen2))
register(Member("Llama 3.1", "LlamaForCausalLM", lambda: llama(tied=False)))
register(Member("Llama 3.1, tied", "LlamaForCausalLM", lambda: llama(tied=True)))


def gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(**{**TEXT, "tie_word_embeddings": True}, hidden_act="gelu_pytorch_tanh")


def gemma3() -> Any:
    from transformers import Gemma3TextConfig

    sliding, full = "sliding_attention", "full_attention"
    return Gemma3TextConfig(
        **{**TEXT, "tie_word_embeddings": True},
        query_pre_attn_scalar=16,
        sliding_window=24,
        layer_types=[sliding, full, sliding, full, sliding],
    )


def gemma4() -> Any:
    """A wrapper, served with text. Embeddings scaled by the square root of the hidden size, logits soft-capped,
    full layers of a shape of their own."""
    from transformers import Gemma4Config

    text = dict(
        **{**TEXT, "tie_word_embeddings": True},
        global_head_dim=32,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        sliding_window=24,
        layer_types=[
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        final_logit_softcapping=30.0,
    )
    vision = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
    )
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None)


register(
    Member(
        "Gemma 2",
        "Gemma2ForCausalLM",
        gemma2,
        refused="target config architectures=['Gemma2ForCausalLM']: expected a target whose class in SGLang has "
        "set_dflash_layers_to_capture or set_eagle3_layers_to_capture, which feed the draft. Serve it without "
        "--speculative-algorithm DFLASH.",
    )
)
register(Member("Gemma 3", "Gemma3ForCausalLM", gemma3))
register(Member("Gemma 4", "Gemma4ForConditionalGeneration", gemma4, processor=processors.gemma4))
