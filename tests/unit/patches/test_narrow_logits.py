"""Logits in the head's dtype at the end of a float32 buffer's memory, and widened there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support import sglang_layers as layers


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def memory(tensor: Tensor) -> tuple[int, int]:
    """Addresses from the first byte to behind the last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor[-1, -1:].data_ptr() - tensor.data_ptr() + tensor.itemsize


@contextmanager
def launches() -> Iterator[list[tuple[int, bool]]]:
    """Numbers of rows that are widened at once, and whether from the buffer itself. No launch may write what it
    reads: it takes its rows in no order."""
    from dflash_sglang.patches import half_precision_logits

    seen: list[tuple[int, bool]] = []
    copy = half_precision_logits._copy

    def apart(source: Tensor, wide: Tensor) -> None:
        (start, end), (wide_start, wide_end) = memory(source), memory(wide)
        assert end <= wide_start or wide_end <= start
        seen.append((len(source), source.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()))
        copy(source, wide)

    with mock.patch.object(half_precision_logits, "_copy", apart):
        yield seen


@settings(max_examples=300, deadline=None)
@given(
    captured=st.integers(1, 70),
    share=st.floats(0, 1),
    vocab=st.integers(1, 400),
    padding=st.integers(0, 70),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
@example(captured=64, share=1.0, vocab=1000, padding=0, dtype=torch.bfloat16, seed=0)
@example(captured=64, share=1.0, vocab=1001, padding=23, dtype=torch.bfloat16, seed=0)
def test_rows_widened_in_their_buffer_are_what_they_were(captured, share, vocab, padding, dtype, seed):
    """Any number of a graph's rows, with padding beyond the vocabulary; numbers of every bit pattern."""
    from dflash_sglang.patches import half_precision_logits

    buffer = torch.full((captured + 3, vocab), 7.0, device=layers.DEVICE)
    placed = half_precision_logits.place(buffer[:captured], vocab + padding, dtype)
    if placed is None:
        assert 2 * (vocab + padding) > 4 * vocab
        return
    bits = torch.randint(-(2**15), 2**15, placed.shape, generator=torch.Generator().manual_seed(seed))
    placed.copy_(bits.to(torch.int16).view(dtype).nan_to_num(nan=-0.0))
    rows = round(share * captured)
    expected = placed[:rows, :vocab].float()
    with launches():
        wide = half_precision_logits.widen(placed[:rows], vocab)
    assert torch.equal(wide.view(torch.int32), expected.view(torch.int32)), "bit for bit"
    assert torch.equal(buffer[:rows], wide), "in the buffer"
    assert bool((buffer[captured:] == 7).all())


@pytest.mark.parametrize("vocab,width", [(1000, 1000), (1001, 1024), (997, 997), (1024, 1088)])
@pytest.mark.parametrize(
    "captured,rows,most", [(512, 512, 11), (512, 340, 2), (512, 200, 1), (16, 16, 6), (1, 1, 1)]
)
def test_widening_takes_a_launch_for_each_half_of_what_is_left(vocab, width, captured, rows, most):
    from dflash_sglang.patches import half_precision_logits

    placed = half_precision_logits.place(torch.zeros(captured, vocab, device=layers.DEVICE), width, torch.bfloat16)
    assert placed is not None
    with launches() as seen:
        half_precision_logits.widen(placed[:rows], vocab)
    assert sum(count for count, _ in seen) == rows and len(seen) <= most
    assert sum(count for count, in_place in seen if not in_place) <= 2


@pytest.mark.parametrize("rows,vocab,width", [(5, 151936, 151936), (3, 50257, 50304), (7, 333, 340), (4, 100, 51)])
def test_narrow_rows_are_aligned_as_an_allocation_and_end_where_the_buffer_does(rows, vocab, width):
    from dflash_sglang.patches import half_precision_logits

    buffer = torch.zeros(rows, vocab)
    placed = half_precision_logits.place(buffer, width, torch.bfloat16)
    assert placed is not None and placed.shape == (rows, width) and placed.is_contiguous()
    start, end = (address - buffer.data_ptr() for address in memory(placed))
    assert start % 256 == 0 and 0 <= 4 * buffer.numel() - end < 256


def test_float32_logits_are_the_buffer_and_what_is_larger_than_it_has_no_place():
    from dflash_sglang.patches import half_precision_logits

    buffer = torch.zeros(6, 40)
    placed = half_precision_logits.place(buffer, 40, torch.float32)
    assert placed is not None and memory(placed) == memory(buffer) and placed.shape == buffer.shape
    assert half_precision_logits.place(buffer, 41, torch.float32) is None
    assert half_precision_logits.place(buffer, 81, torch.bfloat16) is None
