"""What multimodal targets read requests with: a token per byte, as the trained pair has, and those of images."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# In place of and around an image, and the ids that a Qwen tokenizer of the zoo gives them.
IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
IMAGE_IDS = dict(image_token_id=260, video_token_id=261, vision_start_token_id=262, vision_end_token_id=263)
PIXELS = dict(min_pixels=4 * 28 * 28, max_pixels=16 * 28 * 28)
TEMPLATE = "{{ messages[0]['content'] }}"


def tokenizer(**named: str) -> Any:
    """`named`: special tokens that the tokenizer has as attributes."""
    from transformers import AutoTokenizer

    from training.pair import pair_directories

    return AutoTokenizer.from_pretrained(pair_directories()["target"], extra_special_tokens=named)


def qwen_tokenizer() -> Any:
    tokens = tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO, START, END]})
    assert tokens.convert_tokens_to_ids([IMAGE, VIDEO, START, END]) == list(IMAGE_IDS.values())
    return tokens


def qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**PIXELS),
        tokenizer=qwen_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    )


def qwen3_vl() -> Any:
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, **PIXELS),
        tokenizer=qwen_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    )


PIXTRAL = dict(patch_size=14, image_size=112)  # in pixels; of the tower
PIXTRAL_IMAGE, PIXTRAL_BREAK, PIXTRAL_END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


def pixtral(merged: int) -> Any:
    """merged: patches along each side of what becomes one token."""
    from transformers import PixtralImageProcessor, PixtralProcessor

    tokens = tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": [PIXTRAL_IMAGE, PIXTRAL_BREAK, PIXTRAL_END]})
    assert tokens.convert_tokens_to_ids(PIXTRAL_IMAGE) == IMAGE_IDS["image_token_id"]
    size = {"longest_edge": PIXTRAL["image_size"]}
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(size=size, patch_size=PIXTRAL["patch_size"]),
        tokenizer=tokens,
        patch_size=PIXTRAL["patch_size"],
        spatial_merge_size=merged,
        chat_template=TEMPLATE,
    )


def gemma4() -> Any:
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(),
        tokenizer=tokenizer(
            image_token="<|image|>",
            boi_token="<|image>",
            eoi_token="<image|>",
            audio_token="<|audio|>",
            boa_token="<|audio>",
            eoa_token="<audio|>",
        ),
        video_processor=Gemma4VideoProcessor(),
    )


@functools.cache
def image() -> Any:
    """Random pixels, as PIL has them."""
    from PIL import Image

    pixels = torch.rand((70, 98, 3), generator=torch.Generator().manual_seed(3)) * 255
    return Image.fromarray(pixels.byte().numpy())


def image_url() -> str:
    with io.BytesIO() as png:
        image().save(png, "PNG")
        return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def with_image(directory: Path, prompt: Sequence[int]) -> dict[str, torch.Tensor]:
    """Inputs of a transformers model, whose processor is in `directory`, for a prompt with the image in it."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    return processor(text=[processor.tokenizer.decode(prompt)], images=[image()], return_tensors="pt")
