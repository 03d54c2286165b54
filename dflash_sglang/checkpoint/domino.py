"""DominoSpec: what a Domino checkpoint's config.json adds to a plain draft's."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, as_bool, as_int


@dataclass(frozen=True)
class DominoSpec:
    state_size: int  # of the GRU
    rank: int  # width of the vectors that tokens are scored with
    # Whether each row proposes the token after its own, the last committed token's the first one. The last row of
    # a block then has no proposal.
    shifted: bool


def domino(fields: Fields, vocab_size: int) -> DominoSpec:
    """Raises DraftConfigError for a field that is missing, malformed or not servable."""
    prefix = fields.draft("pure_draft_prefix_len")
    if prefix[1] != 1 or isinstance(prefix[1], bool):
        raise DraftConfigError(*prefix, "1: the first proposal is the row's own, the GRU corrects the others")
    fields.check_whole_vocabulary(vocab_size, "Domino's projector has a row for every token", "Domino")
    return DominoSpec(
        state_size=as_int(fields.draft("gru_hidden_dim"), 1),
        rank=as_int(fields.draft("emb_dim"), 1),
        shifted=as_bool(fields.draft("shift_label")),
    )
