"""Why a draft may be accepted less than it should, likeliest first: for `check` and for the acceptance alarm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash_sglang.checkpoint.draft_spec import DraftSpec
from dflash_sglang.checkpoint.in_words import layers_read, rope_read
from dflash_sglang.checkpoint.mtp import MtpSpec

TARGET = "the target: expected the very checkpoint that the draft was trained for, not a fine-tuned one"
TEXT = "the text: expected the chat template, thinking mode and language that the draft was trained with"


@dataclass(frozen=True)
class PairFacts:
    """What is known of a pair. Layers and tokens are numbers of them; quantization: of the draft, or "none"."""

    spec: DraftSpec | MtpSpec
    target_layers: int | None
    target_vocabulary: int
    quantization: str

    def causes(self, context: int, context_of: str) -> Iterator[str]:
        """Yield what to check of the two checkpoints, with what this pair has.

        context: tokens that the draft was asked at; context_of: which they are, in words.
        """
        spec, rope, rows = self.spec, "", self.spec.vocab_size
        if isinstance(spec, DraftSpec):  # multi-token-prediction layers read no features that a config names
            ids, of_target = list(spec.target_layer_ids), f" of {self.target_layers}" if self.target_layers else ""
            unordered = "; these do not ascend, as most drafts' do" if ids != sorted(ids) else ""
            yield (
                f"target_layer_ids={ids}{of_target}: expected the layers that the draft was trained on, counted "
                f"from 0, in that order{unordered}"
            )
            yield f"mask_token_id={spec.mask_token_id}: expected the mask token of the draft's training"
            rope, rows = f"; rope={rope_read(spec)}", spec.vocabulary.draft_vocab_size or rows
        yield f"layers={layers_read(spec)}{rope}: compare with the draft's model card"
        yield (
            f"vocabulary: draft {rows}, target {self.target_vocabulary}: expected the same tokens, or a map into "
            "the target's (d2t, --speculative-token-map)"
        )
        if self.quantization != "none":
            yield f"draft quantization={self.quantization}: try the bf16 draft"
        full, most = any(not layer.window for layer in spec.layers), spec.max_position_embeddings
        window = "; try --speculative-draft-window-size" if full and context > most // 2 else ""
        yield f"contexts of {context} tokens {context_of}: expected those of its training, up to {most}{window}"
