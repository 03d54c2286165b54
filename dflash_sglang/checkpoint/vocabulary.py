"""What the config says of a draft's embedding, head and vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_sglang.checkpoint.fields import Fields, as_bool, as_float, as_int

DRAWN_FROM = 16
"""The likeliest tokens of a draft that a drawn proposal comes from."""


@dataclass(frozen=True)
class VocabularySpec:
    """Embedding, head and logits of a draft; None: the config does not say."""

    draft_vocab_size: int | None  # rows of a head of the draft's own
    has_head: bool | None  # whether the checkpoint is to hold one
    has_embedding: bool | None  # the same
    embedding_scale: float  # factor on the block's embeddings
    logit_multiplier: float  # a logit x of the head becomes multiplier * x,
    logit_softcap: float | None  # and then, with a softcap c, c * tanh(x / c)


def vocabulary(fields: Fields) -> VocabularySpec:
    """VocabularySpec of a draft. Scales and caps count in `dflash_config` alone: the top level holds those
    that were copied from the target. Raises DraftConfigError for a malformed field."""
    cap = _nested(fields, "final_logit_softcapping", 0)
    return VocabularySpec(
        draft_vocab_size=fields.optional("draft_vocab_size", as_int, 1),
        has_head=fields.optional("has_lm_head", as_bool),
        has_embedding=fields.optional("has_embed_tokens", as_bool),
        embedding_scale=as_float(_nested(fields, "input_embedding_scale", 1.0)),
        logit_multiplier=as_float(_nested(fields, "output_multiplier", 1.0)),
        logit_softcap=None if cap[1] == 0 else as_float(cap),
    )


def _nested(fields: Fields, name: str, default: float) -> tuple[str, Any]:
    value = fields.nested.get(name)
    return f"dflash_config.{name}", default if value is None else value
