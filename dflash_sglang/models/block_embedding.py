"""Embeddings of a block's rows: by the target's table or the draft's own, mask rows by a trained one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
