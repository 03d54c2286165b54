"""What was read of a draft, in words, and why it may be accepted less than it should.

A wrong reading of its layers or its RoPE shows in the start-up line; `check` and the acceptance alarm name causes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dflash_sglang.checkpoint.draft_spec import DraftSpec
from dflash_sglang.checkpoint.mtp import MtpSpec

TARGET = "the target: expected the very checkpoint that the draft was trained for, not a fine-tuned one"
TEXT = "the text: expected the chat template, thinking mode and language that the draft was trained with"


def layers_read(spec: DraftSpec | MtpSpec) -> str:
    """Kind, window and causality of every layer, equal neighbours as one: `0-4 sliding(4096) causal, 5 full not
    causal`. The window is in tokens and counts the query's own."""
    parts, start = [], 0
    for layer, equal in itertools.groupby(spec.layers):
        last = start + len(list(equal)) - 1
        numbers = f"{start}" if last == start else f"{start}-{last}"
        kind = layer.kind.removesuffix("_attention") + (f"({layer.window})" if layer.window else "")
        parts.append(f"{numbers} {kind} {'causal' if layer.causal else 'not causal'}")
        start = last + 1
    return ", ".join(parts)


def rope_read(spec: DraftSpec) -> str:
    """Base, rotated dimensions and scaling, the same in every layer: `theta 10000, 64 of 128 dimensions`."""
    rope = spec.rope
    scaling = rope.scaling or {}
    arguments = [f" {key} {value}" for key, value in scaling.items() if key != "rope_type"]
    parts = [
        f"theta {rope.theta:.10g}",
        f"{rope.rotary_dim} of {spec.head_dim} dimensions",
        *([] if rope.is_neox else ["interleaved"]),
        *([scaling["rope_type"] + "".join(arguments)] if scaling else []),
    ]
    return ", ".join(parts)


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
