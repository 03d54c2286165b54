"""What a draft takes of its target: the embedding, and the head, unless its checkpoint holds its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dflash_sglang.models.head.draft_head import HeadCopy
from dflash_sglang.models.head.target_head import TargetHead

if TYPE_CHECKING:
    from dflash_sglang.checkpoint import DraftSpec
    from dflash_sglang.checkpoint.mtp import MtpSpec


class BlockEmbedding:
    """Block ids -> rows, capturable. No module: a table that is the target's must not become the draft's.

    mask_row [hidden]: stands for the row of `mask_token_id` in the table, which it leaves as it is.
    scale: factor on all rows. as_stored: the rows of a table whose module scales them are taken unscaled.
    """

    def __init__(
        self,
        table: nn.Module,
        scale: float,
        mask_row: Tensor | None,
        mask_token_id: int | None,
        as_stored: bool = False,
    ):
        self.table = table
        self._as_stored = as_stored and isinstance(table, nn.Embedding)
        self._scale = scale
        self._mask_row = mask_row
        self._mask_token_id = mask_token_id

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, hidden]"""
        rows = nn.functional.embedding(ids, self.table.weight) if self._as_stored else self.table(ids)
        if self._mask_row is not None:
            rows = torch.where((ids == self._mask_token_id)[:, None], self._mask_row.to(rows.dtype), rows)
        return rows if self._scale == 1.0 else rows * self._scale


@dataclass(frozen=True)
class Borrowed:
    """What the draft embeds and proposes with. Held by a plain object, so that the target's modules are no
    submodules of the draft: its state dict and its weight updates must not reach them."""

    embedding: BlockEmbedding
    head: TargetHead
    head_copy: HeadCopy | None  # the head's weights where they are a copy, to be refreshed with what was copied
    head_form: str  # what they are and why, for the start-up line


class BorrowingDraft(nn.Module):
    """What SGLang's runner asks of a draft model. Its `bind_target` sets `borrowed`, once, after loading."""

    spec: DraftSpec | MtpSpec

    def __init__(self) -> None:
        super().__init__()
        self.borrowed: Borrowed | None = None
        self._loaded = False

    @property
    def head(self) -> TargetHead:
        """The head that proposals come from; of several, the first one's."""
        return self._bound().head

    def get_input_embeddings(self) -> nn.Module:
        return self._bound().embedding.table

    def get_attention_sliding_window_size(self) -> int | None:
        """Keys to the left of a query that a sliding layer sees; None without sliding layers."""
        windows = [layer.window for layer in self.spec.layers if layer.window is not None]
        return max(windows) - 1 if windows else None

    def post_load_weights(self) -> None:
        """Called by the loaders that fill the parameters without `load_weights` (dummy, sharded state)."""
        self._loaded = True

    def _bound(self) -> Borrowed:
        if self.borrowed is None:
            raise RuntimeError("The draft has not borrowed of its target yet: call bind_target first.")
        return self.borrowed
