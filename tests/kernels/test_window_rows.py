"""Rows of a windowed draft's slot table against a loop: sinks, window and block of every request, whole pages."""

from __future__ import annotations

import pytest
import torch

from dflash_sglang.kernels.block import window_rows as kernels


def seen_columns(prefix: int, span: kernels.Span) -> list[int]:
    """Context positions that the block sees, token by token."""
    page = span.page_size
    first = (prefix - span.window) // page * page  # negative: the window reaches before the text
    return [p for p in range(prefix) if p < span.sinks or p >= first]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("sinks", [0, 32])
@pytest.mark.parametrize("window", [9, 40, 1500])
def test_a_row_holds_the_sinks_the_window_and_the_block_and_no_more(twin, device, window, sinks, page):
    width, block = 4096, 8
    span = kernels.Span(window, sinks, page)
    table = torch.randperm(6 * width, generator=torch.Generator().manual_seed(1)).view(6, width).int()
    prefixes = [1, 33, window + sinks + 5, 3001]
    requests = [4, 1, 2, 0]
    draft_table, seen = torch.full((6, width), -7, dtype=torch.int32, device=device), torch.zeros(9, device=device)
    lengths = seen.long()[: len(prefixes)]
    getattr(kernels, f"window_rows_{twin}")(
        table.to(device),
        torch.tensor(requests, device=device),
        torch.tensor(prefixes, device=device),
        block,
        span,
        kernels.WindowRows(draft_table, lengths),
    )
    expected = torch.full((6, width), -7, dtype=torch.int32)
    for request, prefix, length in zip(requests, prefixes, lengths.tolist(), strict=True):
        columns = seen_columns(prefix, span)
        assert length == len(columns) <= span.widest(block) - block
        row = table[request, columns + list(range(prefix, prefix + block))]
        expected[request, : len(row)] = row
    assert torch.equal(draft_table.cpu(), expected)
