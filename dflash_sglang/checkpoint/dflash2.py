"""DFlash2Spec: what a DFlash2 checkpoint's config.json adds to a plain draft's."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, both_sizes

MAX_CANDIDATES = 32
"""Candidates per position that the kernel of the selector's walk holds in registers."""


@dataclass(frozen=True)
class DFlash2Spec:
    """``selector_rank``: width of the selector's codebooks. ``selector_top_k``: candidates per position. What
    shapes embeddings and logits is in the draft's VocabularySpec.
    """

    selector_rank: int
    selector_top_k: int


def dflash2(fields: Fields, vocab_size: int) -> DFlash2Spec:
    """Raises DraftConfigError for a field that is missing, malformed or not servable."""
    rank, top_k = both_sizes(fields, "selector_rank", "selector_top_k", "the candidate selector")
    expected = min(MAX_CANDIDATES, vocab_size)
    if top_k > expected:
        raise DraftConfigError(
            fields.draft("selector_top_k")[0],
            top_k,
            f"at most {expected} candidates per position",
            "Correct selector_top_k in the draft's config.json, or serve a checkpoint trained with fewer.",
        )
    fields.check_whole_vocabulary(vocab_size, "the selector's codebooks hold every token", "DFlash2")
    return DFlash2Spec(selector_rank=rank, selector_top_k=top_k)
