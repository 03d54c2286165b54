"""Rows of a block by an embedding table: the module's, but for the mask row and the factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import sglang_layers as layers


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids)


@torch.no_grad()
def rows_of(table: nn.Module, ids: Tensor, **own: Any) -> Tensor:
    from dflash_sglang.models.block_embedding import BlockEmbedding

    return BlockEmbedding(table, **(dict(scale=1.0, mask_row=None, mask_token_id=3) | own))(ids)


def test_the_mask_tokens_row_is_the_trained_one_and_all_rows_are_scaled():
    table, ids = nn.Embedding(9, 64, device=layers.DEVICE), torch.tensor([3, 8, 3], device=layers.DEVICE)
    with torch.no_grad():
        assert torch.equal(rows_of(table, ids), table(ids))
        mask_row = torch.randn(64, device=layers.DEVICE)
        expected = 2 * table(ids)
        expected[[0, 2]] = 2 * mask_row
    assert torch.equal(rows_of(table, ids, scale=2.0, mask_row=mask_row), expected)


def test_a_table_that_scales_its_rows_does_so_unless_they_are_asked_for_as_stored():
    table, ids = Scaled(9, 64, device=layers.DEVICE), torch.tensor([3, 8], device=layers.DEVICE)
    assert torch.equal(rows_of(table, ids), 3 * table.weight[ids])
    assert torch.equal(rows_of(table, ids, as_stored=True), table.weight[ids])
