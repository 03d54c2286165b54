"""DSparkSpec: what a DSpark checkpoint's config.json adds to a plain draft's."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.checkpoint.fields import Fields, as_int

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
KINDS = (VANILLA, GATED, RNN)
"""Of Markov heads."""


@dataclass(frozen=True)
class DSparkSpec:
    rank: int  # width of the Markov head's matrices, 0 without a head
    kind: str  # one of KINDS


def dspark(fields: Fields) -> DSparkSpec:
    """Raises DraftConfigError for a rank that is malformed."""
    kind = fields.draft("markov_head_type", VANILLA)[1]  # `families` lets only KINDS pass
    return DSparkSpec(as_int(fields.draft("markov_rank"), 0), kind)
