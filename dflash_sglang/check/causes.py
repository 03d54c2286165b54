"""Why a draft may be accepted less than it should: the likely causes in order, with what this pair has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.in_words import layers_read, rope_read


def likely_causes(spec: DraftSpec, longest: int, widths: Mapping[int, int]) -> Iterator[str]:
    """What to check, first what most often explains a collapse.

    `longest`: tokens of the longest prompt and its completion; `widths`: verify steps of the server by width.
    """
    narrow = sum(steps for width, steps in widths.items() if width < spec.block_size)
    if narrow:
        yield (
            f"width: {narrow} of {sum(widths.values())} steps verified less than the block of {spec.block_size}; "
            'compare drafts at {"width": "block"} in DFLASH_SGLANG_CONFIG'
        )
    layer_ids = list(spec.target_layer_ids)
    unordered = layer_ids != sorted(layer_ids)
    yield (
        f"target_layer_ids={layer_ids}: expected the layers that the draft was trained on, in that order"
        + ("; these do not ascend, as most drafts' do" if unordered else "")
    )
    yield f"mask_token_id={spec.mask_token_id}: expected the mask token of the draft's training"
    yield f"layers={layers_read(spec)}; rope={rope_read(spec)}: compare with the draft's model card"
    rows = spec.vocabulary.draft_vocab_size or spec.vocab_size
    yield f"vocabulary of {rows} tokens: expected the target's, or a map into it (d2t, --speculative-token-map)"
    if spec.quantization:
        yield f"quantised draft ({spec.quantization}): compare with its dense checkpoint"
    windows = [layer.window for layer in spec.layers if layer.window]
    if len(windows) < len(spec.layers) and longest > spec.max_position_embeddings // 2:
        yield (
            f"contexts of up to {longest} tokens: a draft that was trained on shorter ones loses acceptance; "
            "impose --speculative-draft-window-size"
        )
    yield "the target: expected the very checkpoint that the draft was trained for, not a fine-tuned one"
    yield (
        "the prompts: expected text as the server gets it, chat template and thinking mode included; "
        "random text and other languages than the draft's are accepted less"
    )
