"""Rows of a table by their ids, and which tables are read so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_sglang.kernels.block import gather_rows as kernels
from tests.support import sglang_layers as layers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [64, 1025])
def test_every_row_is_its_ids(twin, device, hidden, dtype):
    table = torch.randn(9, hidden + 3).to(dtype).to(device)[:, :hidden]
    ids = torch.tensor([7, 8, 0, 8, 3], device=device)[1:]
    got = getattr(kernels, f"gather_rows_{twin}")(table, ids)
    assert got.dtype == dtype and torch.equal(got.cpu(), table.cpu()[[8, 0, 8, 3]])


def test_no_ids_give_no_rows(twin, device):
    got = getattr(kernels, f"gather_rows_{twin}")(
        torch.randn(9, 64, device=device), torch.empty(0).long().to(device)
    )
    assert got.shape == (0, 64)


def embedded(table: nn.Module, ids: Tensor, monkeypatch: pytest.MonkeyPatch, **own: Any) -> tuple[Tensor, int]:
    """Rows by BlockEmbedding, and how many gathers they took."""
    from dflash_sglang.models import block_embedding

    gathers: list[Tensor] = []

    def counted(*inputs: Tensor) -> Tensor:
        gathers.append(inputs[1])
        return kernels.gather_rows(*inputs)

    monkeypatch.setattr(block_embedding, "gather_rows", counted)
    arguments = dict(scale=1.0, mask_row=None, mask_token_id=3) | own
    with torch.no_grad():
        return block_embedding.BlockEmbedding(table, **arguments)(ids), len(gathers)


def plain_table(table_class: type | None = None) -> Any:
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layers.start_rank()
    with layers.defaults(torch.bfloat16):
        table = (table_class or VocabParallelEmbedding)(9, 64)
    table.weight.data.copy_(torch.randn(table.weight.shape))
    return table


def test_a_plain_table_is_gathered_and_gives_the_modules_rows(monkeypatch):
    table, ids = plain_table(), torch.tensor([3, 8, 3], device=layers.DEVICE)
    rows, gathers = embedded(table, ids, monkeypatch)
    assert gathers == 1 and torch.equal(rows, table(ids))
    mask_row = torch.randn(64, device=layers.DEVICE)
    rows, gathers = embedded(table, ids, monkeypatch, scale=2.0, mask_row=mask_row)
    expected = 2 * table(ids)
    expected[[0, 2]] = 2 * mask_row.bfloat16()
    assert gathers == 1 and torch.equal(rows, expected)
    table.weight = nn.Parameter(torch.randn_like(table.weight), requires_grad=False)
    assert torch.equal(embedded(table, ids, monkeypatch)[0], table(ids))


def test_any_other_table_embeds_by_itself(monkeypatch):
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    class Scaled(VocabParallelEmbedding):
        def forward(self, ids: Tensor) -> Tensor:
            return 3 * super().forward(ids)

    class Quantised:
        def embedding(self, table: Any, ids: Tensor) -> Tensor:
            return torch.full((len(ids), 64), 5.0)

    ids = torch.tensor([3, 8, 3], device=layers.DEVICE)
    for table in (nn.Embedding(9, 64, device=layers.DEVICE), plain_table(Scaled)):
        rows, gathers = embedded(table, ids, monkeypatch)
        assert gathers == 0 and torch.equal(rows, table(ids))
    quantised, widened, sharded = (plain_table() for _ in range(3))
    quantised.quant_method = Quantised()
    rows, gathers = embedded(quantised, ids, monkeypatch)
    assert gathers == 0 and bool((rows == 5).all())
    widened.output_dtype = torch.float32
    rows, gathers = embedded(widened, ids, monkeypatch)
    assert gathers == 0 and rows.dtype == torch.float32
    sharded.tp_size = 2
    monkeypatch.setattr(VocabParallelEmbedding, "forward", lambda self, ids: torch.zeros(len(ids), 64))
    rows, gathers = embedded(sharded, ids, monkeypatch)
    assert gathers == 0 and not rows.any()
