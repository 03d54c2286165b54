"""DSparkSpec: what a DSpark checkpoint's config.json adds to a plain draft's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, as_bool, as_int
from dflash_sglang.checkpoint.gemma4 import is_gemma4
from dflash_sglang.checkpoint.speculators import ALGORITHM, DSPARK, is_speculators

DSPARK_ARCHITECTURES = ("Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel")
"""Names under which checkpoints declare one and the same model."""

VANILLA, GATED, RNN = "vanilla", "gated", "rnn"
KINDS = (VANILLA, GATED, RNN)
"""Of Markov heads."""


@dataclass(frozen=True)
class DSparkSpec:
    rank: int  # width of the Markov head's matrices, 0 without a head
    kind: str  # one of KINDS
    from_anchor: bool  # whether the last committed token's row proposes, too: a block has a token more than rows


def is_dspark(config: Mapping[str, Any]) -> bool:
    """Whether a raw config.json declares a DSpark draft: by its algorithm in the speculators format, else by its
    first architecture."""
    if is_speculators(config):
        return bool(config.get(ALGORITHM) == DSPARK)
    names = config.get("architectures")
    return is_gemma4(config) or (isinstance(names, list) and bool(names) and names[0] in DSPARK_ARCHITECTURES)


def dspark(fields: Fields, vocab_size: int) -> DSparkSpec:
    """Raises DraftConfigError for a field that is missing, malformed or not servable."""
    rank_field, rank = fields.draft("markov_rank")
    if rank is None:
        raise DraftConfigError(
            rank_field,
            rank,
            "the rank of the Markov head",
            f"Add {rank_field} to the draft's config.json; 0 without a head.",
        )
    if rank:
        fields.check_whole_vocabulary(vocab_size, "the Markov head has a row for every token", "DSpark")
    kind = fields.draft("markov_head_type", VANILLA)[1]  # `families` lets only KINDS pass
    return DSparkSpec(as_int((rank_field, rank), 0), kind, as_bool(fields.draft("sample_from_anchor", True)))
