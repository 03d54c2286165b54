"""Block input and accept: conformance C1, C2, C3 and the row bound of C4, torch twins and Triton kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels import accept as accept_kernels
from dflash_sglang.kernels import prepare_block as block_kernels

MASK = 259


def on(device, *values):
    return [torch.tensor(value, device=device) for value in values]


def slot_table(rows: int, width: int) -> torch.Tensor:
    """Every entry names its row and column: slot = 1000 * row + column."""
    return (torch.arange(rows)[:, None] * 1000 + torch.arange(width)).int()


def prepare(device, launch, bonus, seq_lens, requests, table, block, row_limit):
    out = block_kernels.BlockTensors(
        *(torch.full((len(bonus), block), -7, device=device) for _ in range(3)),
        torch.full((len(bonus),), -7, device=device),
    )
    launch(
        block_kernels.BlockSources(*on(device, bonus, seq_lens, requests), table.to(device)), MASK, row_limit, out
    )
    return out


def test_a_block_is_the_last_token_and_masks_at_the_positions_after_the_prefix(twin, device):
    launch = getattr(block_kernels, f"prepare_block_{twin}")
    ids, positions, slots, prefix = prepare(
        device, launch, [100, 200, 300], [10, 8, 12], [0, 1, 2], slot_table(4, 64), block=4, row_limit=64
    )
    assert ids.tolist() == [[100, MASK, MASK, MASK], [200, MASK, MASK, MASK], [300, MASK, MASK, MASK]]
    assert positions.tolist() == [[10, 11, 12, 13], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert slots.tolist() == [[10, 11, 12, 13], [1008, 1009, 1010, 1011], [2012, 2013, 2014, 2015]]
    assert prefix.tolist() == [10, 8, 12]


def test_compact_batch_rows_use_the_slots_of_their_persistent_requests(twin, device):
    launch = getattr(block_kernels, f"prepare_block_{twin}")
    _, _, slots, _ = prepare(device, launch, [1, 2], [5, 7], [3, 1], slot_table(4, 32), block=2, row_limit=32)
    assert slots.tolist() == [[3005, 3006], [1007, 1008]]


def test_a_request_that_outran_its_row_is_moved_back_into_it(twin, device):
    launch = getattr(block_kernels, f"prepare_block_{twin}")
    _, positions, slots, prefix = prepare(
        device, launch, [1, 2], [59, 63], [0, 1], slot_table(3, 64), block=8, row_limit=64
    )
    assert prefix.tolist() == [56, 56]
    assert positions[1].tolist() == list(range(56, 64))
    assert slots[1].tolist() == list(range(1056, 1064)), "no slot of request 2"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_block_kernel_equals_its_torch_twin(triton_runs, device, data):
    block = data.draw(st.integers(2, 17))
    width = data.draw(st.integers(block, 70))
    bs = data.draw(st.integers(1, 5))
    seq_lens = data.draw(st.lists(st.integers(0, width + 20), min_size=bs, max_size=bs))
    requests = data.draw(st.permutations(range(6)))[:bs]
    bonus = data.draw(st.lists(st.integers(0, 300_000), min_size=bs, max_size=bs))
    table = slot_table(6, width)
    arguments = (bonus, seq_lens, requests, table, block, width)
    of_torch = prepare(device, block_kernels.prepare_block_torch, *arguments)
    of_triton = prepare(device, block_kernels.prepare_block_triton, *arguments)
    for expected, got in zip(of_torch, of_triton, strict=True):
        assert torch.equal(expected, got)


def test_the_next_block_starts_at_the_first_row_that_was_not_committed(twin, device):
    accept = getattr(accept_kernels, f"accept_{twin}")
    # Rows at 10..13; the target agrees with the first proposal only: rows 12 and 13 are rejected.
    out = accept(*on(device, [[5, 6, 7, 8]], [[6, 99, 0, 0]], [10]))
    assert out.commit_lens.tolist() == [2]
    assert out.bonus_tokens.tolist() == [99]
    assert out.new_seq_lens.tolist() == [12]


@pytest.mark.parametrize("agreeing", range(4))
def test_a_block_commits_the_agreeing_prefix_and_one_token(twin, device, agreeing):
    accept = getattr(accept_kernels, f"accept_{twin}")
    tokens = torch.tensor([[5, 6, 7, 8]])
    target = torch.tensor([[6, 7, 8, 9]])
    if agreeing < 3:
        target[0, agreeing] = 50  # later rows agree again, and must not count
    out = accept(*on(device, tokens.tolist(), target.tolist(), [100]))
    assert out.commit_lens.tolist() == [agreeing + 1]
    assert out.bonus_tokens.tolist() == [50 if agreeing < 3 else 9]
    assert out.new_seq_lens.tolist() == [100 + agreeing + 1]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), bs=st.integers(1, 6), block=st.integers(2, 17))
def test_the_accept_kernel_equals_its_torch_twin(triton_runs, device, seed, bs, block):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (bs, block), generator=generator)
    target = torch.randint(0, 3, (bs, block), generator=generator)
    prefix = torch.randint(0, 1000, (bs,), generator=generator)
    tokens, target, prefix = tokens.to(device), target.to(device), prefix.to(device)
    for expected, got in zip(
        accept_kernels.accept_torch(tokens, target, prefix),
        accept_kernels.accept_triton(tokens, target, prefix),
        strict=True,
    ):
        assert torch.equal(expected, got) and expected.dtype == got.dtype
