"""Vision-language targets: a text model nested in a wrapper, M-RoPE positions."""

from __future__ import annotations

from typing import Any

from tests.zoo.member import TEXT, Member, register

# The tokens in place of and around an image, and the ids that `tokenizer` gives them.
IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
IMAGE_IDS = dict(image_token_id=260, video_token_id=261, vision_start_token_id=262, vision_end_token_id=263)
PIXELS = dict(min_pixels=4 * 28 * 28, max_pixels=16 * 28 * 28)


def tokenizer() -> Any:
    """One token per byte, as the trained pair's, and those of images."""
    from transformers import AutoTokenizer

    from dflash_sglang.pair import pair_directories

    of_bytes = AutoTokenizer.from_pretrained(pair_directories()["target"])
    of_bytes.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO, START, END]})
    assert of_bytes.convert_tokens_to_ids([IMAGE, VIDEO, START, END]) == list(IMAGE_IDS.values())
    return of_bytes


def qwen2_5_vl_processor() -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**PIXELS),
        tokenizer=tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template="{{ messages[0]['content'] }}",
    )


def qwen3_vl_processor() -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, **PIXELS),
        tokenizer=tokenizer(),
        video_processor=Qwen3VLVideoProcessor(),
        chat_template="{{ messages[0]['content'] }}",
    )


def qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = {key: value for key, value in TEXT.items() if key not in ("head_dim", "tie_word_embeddings")}
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 3, 3])
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=text["hidden_size"],
        fullatt_block_indexes=[1],
    )
    return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision, **IMAGE_IDS)


def qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig

    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2], mrope_interleaved=True)
    vision = dict(
        depth=3,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=TEXT["hidden_size"],
        deepstack_visual_indexes=[0, 1],
        num_position_embeddings=64,
    )
    return Qwen3VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **IMAGE_IDS)


register(
    Member("Qwen2.5-VL", "Qwen2_5_VLForConditionalGeneration", qwen2_5_vl, processor=qwen2_5_vl_processor)
)
register(Member("Qwen3-VL", "Qwen3VLForConditionalGeneration", qwen3_vl, processor=qwen3_vl_processor))
