"""Vision-language targets: a text model nested in a wrapper, M-RoPE positions."""

from __future__ import annotations

import functools
from typing import Any

from tests.zoo import processors
from tests.zoo.member import TEXT, Member, register


def tower(text: dict[str, Any], depth: int, **more: Any) -> dict[str, Any]:
    """Fields of a small vision tower in front of a text model."""
    return dict(
        depth=depth,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=text["hidden_size"],
        **more,
    )


def qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = {key: value for key, value in TEXT.items() if key not in ("head_dim", "tie_word_embeddings")}
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
    vision = tower(text, depth=2, fullatt_block_indexes=[1])
    return Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope}, vision_config=vision, **processors.IMAGE_IDS
    )


def qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig

    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2], mrope_interleaved=True)
    vision = tower(TEXT, depth=3, deepstack_visual_indexes=[0, 1], num_position_embeddings=64)
    return Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **processors.IMAGE_IDS
    )


def wrapper(config_class: str, text_config: dict[str, Any]) -> Any:
    """Mistral's vision tower before a text model, in a class of SGLang that leaves the forward to the latter."""
    import transformers

    # SGLang has SiLU in this tower, whatever the config says.
    vision = dict(
        model_type="pixtral", hidden_size=32, intermediate_size=48, num_hidden_layers=2, hidden_act="silu"
    )
    return getattr(transformers, config_class)(
        text_config=text_config,
        vision_config=dict(**vision, num_attention_heads=2, **processors.PIXTRAL),
        image_token_index=processors.IMAGE_IDS["image_token_id"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


START, IMAGE, END = (processors.IMAGE_IDS[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
# 60 letters first: chunks of 64 tokens end within the image.
IMAGE_PROMPT = (*(97 + i % 23 for i in range(60)), START, IMAGE, END, *range(90, 110))
register(
    Member(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        qwen2_5_vl,
        processor=processors.qwen2_5_vl,
        image_prompt=IMAGE_PROMPT,
    )
)
register(
    Member(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        qwen3_vl,
        processor=processors.qwen3_vl,
        image_prompt=IMAGE_PROMPT,
    )
)

PIXTRAL_PROMPT = tuple(token for token in IMAGE_PROMPT if token not in (START, END))
register(
    Member(
        "Mistral 3",
        "Mistral3ForConditionalGeneration",
        functools.partial(wrapper, "Mistral3Config", dict(model_type="mistral", **TEXT, sliding_window=None)),
        processor=functools.partial(processors.pixtral, merged=2),
        image_prompt=PIXTRAL_PROMPT,
        flush_fails=True,
    )
)
register(
    Member(
        "LLaVA",
        "LlavaForConditionalGeneration",
        functools.partial(wrapper, "LlavaConfig", dict(model_type="qwen2", **TEXT)),
        processor=functools.partial(processors.pixtral, merged=1),
        image_prompt=PIXTRAL_PROMPT,
        flush_fails=True,
    )
)
