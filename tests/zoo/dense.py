"""Dense targets."""

from __future__ import annotations

from typing import Any

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
