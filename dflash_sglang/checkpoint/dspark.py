"""DSparkSpec: what a DSpark checkpoint's config.json adds to a plain draft's."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, as_bool, as_int

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
KINDS = (VANILLA, GATED, RNN)
"""Of Markov heads."""


@dataclass(frozen=True)
class DSparkSpec:
    rank: int  # width of the Markov head's matrices, 0 without a head
    kind: str  # one of KINDS
    from_anchor: bool  # whether the last committed token's row proposes, too: a block has a token more than rows


def dspark(fields: Fields) -> DSparkSpec:
    """Raises DraftConfigError for a field that is missing, malformed or not servable."""
    rank_field, rank = fields.draft("markov_rank")
    if rank is None:
        raise DraftConfigError(
            rank_field,
            rank,
            "the rank of the Markov head",
            f"Add {rank_field} to the draft's config.json; 0 without a head.",
        )
    kind = fields.draft("markov_head_type", VANILLA)[1]  # `families` lets only KINDS pass
    return DSparkSpec(as_int((rank_field, rank), 0), kind, as_bool(fields.draft("sample_from_anchor", True)))
