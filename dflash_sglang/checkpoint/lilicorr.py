"""LiLiCorrSpec: what a LiLiCorr checkpoint's config.json adds to a plain draft's."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.checkpoint.fields import MOST_LAYERS, DraftConfigError, Fields, as_float, as_int

MAX_CANDIDATES = 16
"""Candidates per position; the scores of a step are their square."""

FEATURES = 5
"""Of a candidate: its log-probability, its probability, its log-probability less the likeliest one's, its rank
from 0 to 1, and whether it is the likeliest."""


@dataclass(frozen=True)
class LiLiCorrSpec:
    """Of the head that scores the edges between candidates.

    ``candidates``: per position. ``hidden_size``, ``num_layers``, ``num_heads``, ``intermediate_size``: of its
    transformer. ``factor_size``: of the vectors whose products are the scores, ``eps`` the least length that they
    are divided by, ``scale`` the factor on the products.
    """

    candidates: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    factor_size: int
    eps: float
    scale: float


def lilicorr(fields: Fields, hidden_size: int, vocab_size: int) -> LiLiCorrSpec:
    """Raises DraftConfigError for a field that is missing, malformed or not servable."""
    enabled = fields.draft("lilicorr_enabled", True)
    if enabled[1] is not True:
        raise DraftConfigError(
            *enabled,
            "true or none in a draft of the architecture LiLiCorrDraftModel",
            "Correct it, or name the architecture of the draft without its head: DFlashDraftModel.",
        )
    fields.check_whole_vocabulary(vocab_size, "LiLiCorr was trained on the likeliest tokens of all", "LiLiCorr")
    width = as_int(fields.draft("lilicorr_hidden_size"), 0) or hidden_size
    heads = fields.draft("lilicorr_num_heads")
    if width % as_int(heads, 1):
        raise DraftConfigError(*heads, f"a divisor of the head's hidden size of {width}")
    return LiLiCorrSpec(
        candidates=as_int(fields.draft("lilicorr_candidate_topk"), 1, min(MAX_CANDIDATES, vocab_size)),
        hidden_size=width,
        num_layers=as_int(fields.draft("lilicorr_num_layers"), 1, MOST_LAYERS),
        num_heads=heads[1],
        intermediate_size=int(width * as_float(fields.draft("lilicorr_mlp_ratio"))),
        factor_size=as_int(fields.draft("lilicorr_factor_dim"), 1),
        eps=as_float(fields.draft("lilicorr_vector_eps")),
        scale=as_float(fields.draft("lilicorr_logit_scale")),
    )
