"""Rows of a windowed draft's slot table against a loop: sinks, window and block of every request, whole pages."""

from __future__ import annotations

import pytest
import torch

from dflash_sglang.kernels.block import window_rows as kernels

ROWS, WIDTH, BLOCK = 6, 4096, 8


def seen_columns(prefix: int, span: kernels.Span, low: int = 0) -> list[int]:
    """Context positions that the block sees, token by token."""
    page = span.page_size
    first = max(prefix - span.window, low) // page * page  # negative: the window reaches before the text
    return [p for p in range(prefix) if p < span.sinks or p >= first]


def assert_rows(
    twin: str, device: str, source: torch.Tensor | kernels.RingSlots, span: kernels.Span, slots: torch.Tensor,
    prefixes: dict[int, int], lows: tuple[int, ...] = (0,) * ROWS,
) -> None:  # fmt: skip
    """slots [ROWS, WIDTH]: of each position, by the row. prefixes: by row, in the order of a batch."""
    draft_table = torch.full((ROWS, WIDTH), -7, dtype=torch.int32, device=device)
    out = kernels.WindowRows(draft_table, torch.zeros(len(prefixes), dtype=torch.int64, device=device))
    rows, lens = (torch.tensor([*values], device=device) for values in (prefixes, prefixes.values()))
    getattr(kernels, f"window_rows_{twin}")(source, rows, lens, BLOCK, span, out)
    expected = torch.full((ROWS, WIDTH), -7, dtype=torch.int32)
    for (row, prefix), length in zip(prefixes.items(), out.prefix_lens.tolist(), strict=True):
        columns = seen_columns(prefix, span, lows[row])
        assert length == len(columns) == prefix - span.left_out(torch.tensor(prefix), lows[row])
        assert length <= span.widest(BLOCK) - BLOCK
        seen = slots[row, columns + list(range(prefix, prefix + BLOCK))]
        expected[row, : len(seen)] = seen
    assert torch.equal(draft_table.cpu(), expected)


@pytest.mark.parametrize(("sinks", "page"), [(0, 1), (32, 1), (0, 16), (32, 16)])
@pytest.mark.parametrize("window", [9, 40, 1500])
def test_a_row_holds_the_sinks_the_window_and_the_block_and_no_more(twin, device, window, sinks, page):
    table = torch.randperm(ROWS * WIDTH, generator=torch.Generator().manual_seed(1)).view(ROWS, WIDTH).int()
    prefixes = {4: 1, 1: 33, 2: window + sinks + 5, 0: 3001}
    assert_rows(twin, device, table.to(device), kernels.Span(window, sinks, page), table, prefixes)


@pytest.mark.parametrize("page", [1, 16])
def test_a_block_reads_what_its_ring_has_of_the_window_and_itself(twin, device, page):
    span, size, lows = kernels.Span(40, 0, page), 8 * page + 64, (280, 0, 0, 5, 330, 0)
    ring_of_row = torch.tensor([3, 0, 7, 1, 5, 2])
    slots = (page + ring_of_row[:, None] * size + torch.arange(WIDTH) % size).int()
    source = kernels.RingSlots(ring_of_row.to(device), torch.tensor(lows, device=device), size)
    assert_rows(twin, device, source, span, slots, {1: 3, 2: 300, 0: 300, 4: 330, 3: 320}, lows)
