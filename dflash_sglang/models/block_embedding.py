"""Embeddings of a block's rows: by the target's table or the draft's own, mask rows by a trained one."""

from __future__ import annotations

import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from dflash_sglang.kernels.block.gather_rows import gather_rows
from dflash_sglang.sglang_names.scheduler import UnquantizedEmbeddingMethod


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
        self._is_plain = _is_plain(table) or (as_stored and isinstance(table, nn.Embedding))
        self._scale = scale
        self._mask_row = mask_row
        self._mask_token_id = mask_token_id

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, hidden]"""
        rows = gather_rows(self.table.weight, ids) if self._is_plain else self.table(ids)
        if self._mask_row is not None:
            rows = torch.where((ids == self._mask_token_id)[:, None], self._mask_row.to(rows.dtype), rows)
        return rows if self._scale == 1.0 else rows * self._scale


def _is_plain(table: nn.Module) -> bool:
    """Whether the module's rows are those of its weight: whole, of one rank, neither quantised nor scaled."""
    return (
        type(table) is VocabParallelEmbedding
        and table.tp_size == 1
        and type(table.quant_method) is UnquantizedEmbeddingMethod
        and table.output_dtype in (None, table.weight.dtype)
    )
