"""Rows of a block by an embedding table: the module's, but for the mask row and the factor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_sglang.models.borrowed import BlockEmbedding


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids)


@torch.no_grad()
def test_rows_are_the_tables_but_for_the_trained_mask_row_and_the_factor() -> None:
    table, scaled, ids, mask_row = nn.Embedding(9, 64), Scaled(9, 64), torch.tensor([3, 8, 3]), torch.randn(64)
    assert torch.equal(BlockEmbedding(table, 1.0, None, 3)(ids), table(ids))
    expected = 2 * torch.stack([mask_row, table.weight[8], mask_row])
    assert torch.equal(BlockEmbedding(table, 2.0, mask_row, 3)(ids), expected)
    assert torch.equal(BlockEmbedding(scaled, 1.0, None, 3)(ids), 3 * scaled.weight[ids])
    assert torch.equal(BlockEmbedding(scaled, 1.0, None, 3, as_stored=True)(ids), scaled.weight[ids])
