"""Block input, and where accept writes its outcome: conformance C1 and the row bound of C4, both twins."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels.block import accept as accept_kernels
from dflash_sglang.kernels.block import pack_rows as pack_kernels
from dflash_sglang.kernels.block import prepare_block as block_kernels

MASK = 259
PLACE = 1
FILLER = 3
each_twin = settings(max_examples=40)


def on(device, *values):
    return [torch.tensor(value, device=device) for value in values]


@each_twin
@given(data=st.data())
def test_a_block_is_the_last_token_and_masks_at_the_positions_after_the_prefix(twin, device, data):
    """In the slots of the request's own row, moved back where it has outrun its context. Behind them padding."""
    block = data.draw(st.integers(2, 17))
    width = data.draw(st.integers(block, 70))
    bs, padding = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    seq_lens = data.draw(st.lists(st.integers(0, width + 20), min_size=bs, max_size=bs))
    requests = data.draw(st.permutations(range(6)))[:bs]
    bonus = data.draw(st.lists(st.integers(0, 300_000), min_size=bs, max_size=bs))
    table = torch.arange(6)[:, None] * 1000 + torch.arange(width)  # every entry names its row and column
    relay = torch.full((2, 6), -7)  # rows of others
    relay[0, requests], relay[1, requests] = torch.tensor(seq_lens), torch.tensor(bonus)
    out = block_kernels.BlockTensors(
        *(torch.full((bs + padding, block), -7, device=device) for _ in range(3)),
        *(torch.full((bs + padding,), -7, device=device) for _ in range(2)),
        torch.full((1,), -7, device=device),
    )
    sources = block_kernels.BlockSources(*relay.to(device), *on(device, requests), table.int().to(device))
    getattr(block_kernels, f"prepare_block_{twin}")(sources, MASK, width - block, PLACE, out, FILLER)
    assert out.prefix_lens[bs:].tolist() == [FILLER] * padding
    assert all(not of[bs:].any() for of in (out.positions, out.slots, out.requests))
    out = block_kernels.BlockTensors(*(of[:bs] for of in out[:-1]), out.step)
    prefixes = [min(length, width - block) for length in seq_lens]
    assert (out.prefix_lens.tolist(), out.requests.tolist()) == (prefixes, list(requests))
    assert out.step.tolist() == [PLACE] and out.ids.tolist() == [[last] + [MASK] * (block - 1) for last in bonus]
    assert out.positions.tolist() == [list(range(prefix, prefix + block)) for prefix in prefixes]
    slots = [1000 * row + prefix for row, prefix in zip(requests, prefixes, strict=True)]
    assert out.slots.tolist() == [list(range(slot, slot + block)) for slot in slots]


PLACES, ROWS = 5, 9


class Accepts:
    """One launch of `accept` into buffers full of sentinels.

    most [bs]: tokens that each request may commit; rows of req_to_token that are nobody's have 1.
    """

    def __init__(
        self, twin, device, tokens, target_ids, prefix_lens, requests, most=None, ragged=None, paths=None, place=3,
    ):  # fmt: skip
        def buffer(*shape, dtype=torch.int64):
            return torch.full(shape, -7, dtype=dtype, device=device)

        self.bs = len(requests)
        self.block = len(tokens[0]) if ragged is None else ragged.block
        if paths is not None:
            self.block = paths.nodes.shape[1]
        self.outcomes = accept_kernels.Outcomes(
            buffer(PLACES, ROWS * self.block + 3)[:, 3:],  # parts of wider rows, as where they are packed
            buffer(PLACES, ROWS + 5, dtype=torch.int32)[:, :ROWS],
            buffer(PLACES, ROWS),
            buffer(PLACES, ROWS),
        )
        self.relay = accept_kernels.Relay(buffer(ROWS), buffer(ROWS))
        each = most or [self.block] * self.bs
        most = [dict(zip(requests, each, strict=True)).get(row, 1) for row in range(ROWS)]
        blocks = accept_kernels.Verification(
            *on(device, tokens, target_ids, prefix_lens, requests, [place], most), ragged
        )
        getattr(accept_kernels, f"accept_{twin}")(blocks, self.outcomes, self.relay, paths)
        commit, bonus, lengths = (buffer[place, : self.bs].tolist() for buffer in self.outcomes[1:])
        self.commit_lens, self.bonus_tokens, self.new_seq_lens = commit, bonus, lengths
        ids = self.outcomes.token_ids[place, : self.bs * self.block].view(self.bs, self.block)
        self.committed = [row[:n].tolist() for row, n in zip(ids, commit, strict=True)]


def test_an_outcome_is_written_at_its_place_and_into_the_relay_rows_of_its_requests_alone(twin, device):
    out = Accepts(twin, device, [[5, 6], [7, 8]], [[6, 1], [2, 3]], [10, 20], [6, 4], place=2)
    assert (out.relay.new_seq_lens[[6, 4]].tolist(), out.relay.bonus_tokens[[6, 4]].tolist()) == ([12, 21], [1, 2])
    assert sum((row == -7).sum().item() for row in out.relay) == 2 * (ROWS - 2)
    for buffer in out.outcomes:
        others = torch.cat([buffer[:2], buffer[3:]])
        assert (others == -7).all() and (buffer[2, out.bs * out.block :] == -7).all()


def ragged_rows(lens, blocks, padding=0):
    """blocks [bs][block] -> the first `lens` of each, and rows that pad a graph."""
    return [value for row, n in zip(blocks, lens, strict=True) for value in row[:n]] + [0] * padding


def starts_of(lens):
    return [sum(lens[:i]) for i in range(len(lens) + 1)]


def test_a_request_without_rows_pads_the_batch_and_changes_no_other(twin, device):
    ragged = accept_kernels.Ragged(*(v.int() for v in on(device, [0, 3, 3], [3, 0])), 4)
    out = Accepts(twin, device, [5, 6, 7], [6, 7, 9], [10, 20], [2, 0], ragged=ragged)
    assert out.committed[0] == [6, 7, 9] and out.new_seq_lens[0] == 13
    assert out.commit_lens[1] == 1 and out.new_seq_lens[1] == 21


@each_twin
@given(data=st.data())
def test_the_first_rows_of_blocks_are_packed_request_after_request(twin, device, data):
    bs, block = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 17))
    lens = data.draw(st.lists(st.integers(1, block), min_size=bs, max_size=bs))
    blocks = [torch.arange(1, bs * block + 1, device=device).view(bs, block) * factor for factor in (1, 10, 100)]
    out = [torch.full((sum(lens) + 9,), -7, device=device) for _ in range(3)]
    starts, widths = (values.int() for values in on(device, starts_of(lens)[:-1], lens))
    getattr(pack_kernels, f"pack_rows_{twin}")(pack_kernels.Rows(*blocks), starts, widths, pack_kernels.Rows(*out))
    for rows, packed in zip(blocks, out, strict=True):
        assert packed.tolist() == ragged_rows(lens, rows.tolist()) + [-7] * 9
