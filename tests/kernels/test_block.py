"""Block input and accept: conformance C1, C2, C3 and the row bound of C4, torch twins and Triton kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels.block import accept as accept_kernels
from dflash_sglang.kernels.block import pack_rows as pack_kernels
from dflash_sglang.kernels.block import prepare_block as block_kernels

MASK = 259
TURN = block_kernels.StepSlot(place=1, coin=2**31 - 1)


def on(device, *values):
    return [torch.tensor(value, device=device) for value in values]


def slot_table(rows: int, width: int) -> torch.Tensor:
    """Every entry names its row and column: slot = 1000 * row + column."""
    return (torch.arange(rows)[:, None] * 1000 + torch.arange(width)).int()


def prepare(device, launch, bonus, seq_lens, requests, table, block, longest):
    out = block_kernels.BlockTensors(
        *(torch.full((len(bonus), block), -7, device=device) for _ in range(3)),
        *(torch.full((len(bonus),), -7, device=device) for _ in range(2)),
        torch.full((2,), -7, device=device),
    )
    relay = torch.full((2, len(table)), -7)  # rows of others
    relay[0, requests], relay[1, requests] = torch.tensor(seq_lens), torch.tensor(bonus)
    sources = block_kernels.BlockSources(*relay.to(device), *on(device, requests), table.to(device))
    launch(sources, MASK, longest, TURN, out)
    assert out.step.tolist() == list(TURN) and out.requests.tolist() == list(requests)
    return out


def test_a_block_is_the_last_token_and_masks_at_the_positions_after_the_prefix(twin, device):
    launch = getattr(block_kernels, f"prepare_block_{twin}")
    ids, positions, slots, prefix, *_ = prepare(
        device, launch, [100, 200, 300], [10, 8, 12], [0, 1, 2], slot_table(4, 64), block=4, longest=60
    )
    assert ids.tolist() == [[100, MASK, MASK, MASK], [200, MASK, MASK, MASK], [300, MASK, MASK, MASK]]
    assert positions.tolist() == [[10, 11, 12, 13], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert slots.tolist() == [[10, 11, 12, 13], [1008, 1009, 1010, 1011], [2012, 2013, 2014, 2015]]
    assert prefix.tolist() == [10, 8, 12]


def test_compact_batch_rows_use_the_slots_of_their_persistent_requests(twin, device):
    launch = getattr(block_kernels, f"prepare_block_{twin}")
    _, _, slots, *_ = prepare(device, launch, [1, 2], [5, 7], [3, 1], slot_table(4, 32), block=2, longest=30)
    assert slots.tolist() == [[3005, 3006], [1007, 1008]]


def test_a_request_that_outran_its_context_is_moved_back(twin, device):
    launch = getattr(block_kernels, f"prepare_block_{twin}")
    _, positions, slots, prefix, *_ = prepare(
        device, launch, [1, 2], [56, 63], [0, 1], slot_table(3, 64), block=8, longest=56
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
    arguments = (bonus, seq_lens, requests, table, block, width - block)
    of_torch = prepare(device, block_kernels.prepare_block_torch, *arguments)
    of_triton = prepare(device, block_kernels.prepare_block_triton, *arguments)
    for expected, got in zip(of_torch, of_triton, strict=True):
        assert torch.equal(expected, got)


PLACES, ROWS = 5, 9


class Accepts:
    """One launch of `accept` into buffers full of sentinels.

    most: tokens that every request may commit, or [bs] of each; rows of req_to_token that are nobody's have 1.
    """

    def __init__(
        self, twin, device, tokens, target_ids, prefix_lens, requests, step=(3, 0), forced=None, most=None,
        ragged=None, paths=None,
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
        each = most if isinstance(most, list) else [most or self.block] * self.bs
        most = [dict(zip(requests, each, strict=True)).get(row, 1) for row in range(ROWS)]
        blocks = accept_kernels.Verification(
            *on(device, tokens, target_ids, prefix_lens, requests, step, most), ragged
        )
        getattr(accept_kernels, f"accept_{twin}")(blocks, self.outcomes, self.relay, forced, paths)
        self.place = step[0]
        commit, bonus, lengths = (buffer[self.place, : self.bs].tolist() for buffer in self.outcomes[1:])
        self.commit_lens, self.bonus_tokens, self.new_seq_lens = commit, bonus, lengths
        ids = self.outcomes.token_ids[self.place, : self.bs * self.block].view(self.bs, self.block)
        self.committed = [row[:n].tolist() for row, n in zip(ids, commit, strict=True)]


def test_the_next_block_starts_at_the_first_row_that_was_not_committed(twin, device):
    # Rows at 10..13; the target agrees with the first proposal only: rows 12 and 13 are rejected.
    out = Accepts(twin, device, [[5, 6, 7, 8]], [[6, 99, 0, 0]], [10], [2])
    assert out.commit_lens == [2]
    assert out.committed == [[6, 99]]
    assert out.bonus_tokens == [99]
    assert out.new_seq_lens == [12]


@pytest.mark.parametrize("agreeing", range(4))
def test_a_block_commits_the_agreeing_prefix_and_one_token(twin, device, agreeing):
    target = [6, 7, 8, 9]
    if agreeing < 3:
        target[agreeing] = 50  # later rows agree again, and must not count
    out = Accepts(twin, device, [[5, 6, 7, 8]], [target], [100], [1])
    assert out.committed == [target[: agreeing + 1]]
    assert out.bonus_tokens == [50 if agreeing < 3 else 9]
    assert out.new_seq_lens == [100 + agreeing + 1]


@pytest.mark.parametrize("most", range(1, 5))
def test_no_more_is_committed_than_a_request_allows_and_the_run_goes_on_from_there(twin, device, most):
    out = Accepts(twin, device, [[5, 6, 7, 8]], [[6, 7, 8, 9]], [100], [1], most=most)
    assert out.committed == [[6, 7, 8, 9][:most]]
    assert out.bonus_tokens == [5 + most] and out.new_seq_lens == [100 + most]


def test_the_limit_of_a_request_is_its_own_wherever_it_stands_in_the_batch(twin, device):
    tokens, target, limits = [[5, 6, 7, 8]] * 3, [[6, 7, 8, 9]] * 3, [3, 1, 4]
    out = Accepts(twin, device, tokens, target, [10, 20, 30], [2, 6, 0], most=limits)
    assert out.commit_lens == limits and out.new_seq_lens == [13, 21, 34]


def test_an_outcome_is_written_at_its_place_and_into_the_relay_rows_of_its_requests_alone(twin, device):
    out = Accepts(twin, device, [[5, 6], [7, 8]], [[6, 1], [2, 3]], [10, 20], [6, 4], step=(2, 0))
    assert (out.relay.new_seq_lens[[6, 4]].tolist(), out.relay.bonus_tokens[[6, 4]].tolist()) == ([12, 21], [1, 2])
    assert sum((row == -7).sum().item() for row in out.relay) == 2 * (ROWS - 2)
    for buffer in out.outcomes:
        others = torch.cat([buffer[:2], buffer[3:]])
        assert (others == -7).all() and (buffer[2, out.bs * out.block :] == -7).all()


@pytest.mark.parametrize("token_id", [None, 100])
def test_a_forced_length_follows_the_coin_and_not_the_target(twin, device, token_id):
    half = 1 << (accept_kernels.COIN_BITS - 1)
    survival = torch.tensor([[2 * half, half, 0]], device=device)  # of proposals 1, 2, 3
    for coin, accepted in ((0, 2), (half - 1, 2), (half, 1), (2 * half - 1, 1)):
        forced = accept_kernels.Forced(survival, alike=True, token_id=token_id)
        out = Accepts(
            twin, device, [[5, 6, 7, 8]] * 2, [[90, 91, 92, 93]] * 2, [10, 20], [1, 2], (0, coin), forced
        )
        tokens = [6, 7][:accepted] + [90 + accepted]
        assert out.committed == [tokens if token_id is None else [token_id] * (accepted + 1)] * 2
        assert out.bonus_tokens == [tokens[-1] if token_id is None else token_id] * 2
        assert out.new_seq_lens == [11 + accepted, 21 + accepted]


def test_requests_of_a_step_draw_lengths_of_their_own_which_average_to_the_profile(twin, device):
    easy, hard = (0.8, 0.4, 0.4), (0.5, 0, 0)  # of which blocks of three leave the last one out
    profiles = [[round(share * 2**31) for share in profile] for profile in (easy, hard)]
    forced = accept_kernels.Forced(torch.tensor(profiles, device=device), alike=False, token_id=None)
    lengths = []
    for coin in range(0, 2**31, 2**25):
        out = Accepts(twin, device, [[5, 6, 7]] * 8, [[0, 0, 0]] * 8, [1] * 8, list(range(8)), (0, coin), forced)
        lengths.append(out.commit_lens)
        assert len(set(out.commit_lens)) > 1
    means = torch.tensor(lengths).float().mean(dim=0)
    assert (means[::2] - 2.2).abs().max() < 0.06 and (means[1::2] - 1.5).abs().max() < 0.06


def recorded(device, accepted, offsets):
    """offsets: of the rows of req_to_token, the others' are 0."""
    rows = [*offsets, *[0] * (ROWS - len(offsets))]
    none = [[[0.0]]] * len(accepted), [[1]] * len(accepted)  # of trees
    recorded, candidates = on(device, accepted, rows), on(device, *none)
    return accept_kernels.Recorded(*recorded, None, *candidates)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_recorded_length_is_that_of_the_place_where_the_committed_tokens_of_a_request_end(twin, device, ragged):
    force = recorded(device, [3, 0, 9, 1, 2], offsets=[0, 4, 2])  # at 10 and 21 tokens: places 0, 4 + 10, 2 + 21
    tokens, target, lens = [[5, 6, 7, 8]] * 3, [[90, 91, 92, 93]] * 3, [2, 4, 4]
    verified = dict(forced=force)
    if ragged:
        starts, widths = on(device, starts_of(lens), lens)
        verified["ragged"] = accept_kernels.Ragged(starts.int(), widths.int(), 4)
        tokens, target = (ragged_rows(lens, rows) for rows in (tokens, target))
    for most, expected in ((4, [2 if ragged else 4, 3, 2]), (2, [2, 2, 2])):
        for _ in range(2):  # a step that is accepted twice, in a graph and after it, commits the same
            out = Accepts(twin, device, tokens, target, [10, 10, 21], [0, 1, 2], (0, 7), most=most, **verified)
            assert out.commit_lens == expected
    assert out.new_seq_lens == [12, 12, 23] and out.committed == [[6, 91]] * 3


def test_recorded_candidates_of_every_request_lie_row_after_row_for_the_kernel_that_grows_trees(device):
    force = recorded(device, [3, 0, 9], offsets=[0, 1, 2])
    force = force._replace(candidates=torch.zeros(3, 5, 4, device=device))
    ids = force.likeliest(*on(device, [0, 1, 2], [7, 7, 9])).ids
    assert (
        ids.is_contiguous() and ids.tolist() == [[[4 * step + rank for rank in range(4)] for step in range(5)]] * 3
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), bs=st.integers(1, 6), block=st.integers(2, 17), forced=st.booleans())
def test_the_accept_kernel_equals_its_torch_twin(triton_runs, device, seed, bs, block, forced):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 3, (bs, block), generator=generator)
    target = torch.randint(0, 3, (bs, block), generator=generator)
    prefix = torch.randint(0, 1000, (bs,), generator=generator)
    requests = torch.randperm(ROWS, generator=generator)[:bs]
    most = torch.randint(1, block + 1, (bs,), generator=generator).tolist()
    coins = torch.randint(0, 2**31, (1 + seed % 3, block), generator=generator)
    survival = coins[:, 1:].sort(dim=1, descending=True).values
    force = accept_kernels.Forced(survival.to(device), alike=bool(seed % 2), token_id=None)
    of_torch, of_triton = (
        Accepts(
            name, device, tokens.tolist(), target.tolist(), prefix.tolist(), requests.tolist(),
            (seed % PLACES, int(coins[0, 0])), force if forced else None, most,
        )
        for name in ("torch", "triton")
    )  # fmt: skip
    for expected, got in zip(
        (*of_torch.outcomes, *of_torch.relay), (*of_triton.outcomes, *of_triton.relay), strict=True
    ):
        assert torch.equal(expected, got)


def ragged_rows(lens, blocks, padding=0):
    """blocks [bs][block] -> the first `lens` of each, and rows that pad a graph."""
    return [value for row, n in zip(blocks, lens, strict=True) for value in row[:n]] + [0] * padding


def starts_of(lens):
    return [sum(lens[:i]) for i in range(len(lens) + 1)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_block_that_is_verified_in_part_commits_what_a_limit_of_as_many_tokens_would(twin, device, data):
    bs, block = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 9))
    of_block = st.lists(st.integers(0, 2), min_size=block, max_size=block)
    tokens, target = ([data.draw(of_block) for _ in range(bs)] for _ in range(2))
    lens = data.draw(st.lists(st.integers(1, block), min_size=bs, max_size=bs))
    prefix, requests = list(range(10, 10 + bs)), data.draw(st.permutations(range(ROWS)))[:bs]
    most = data.draw(st.lists(st.integers(1, block), min_size=bs, max_size=bs))
    padding = data.draw(st.integers(0, 9))
    starts, widths = torch.tensor(starts_of(lens), dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    ragged = accept_kernels.Ragged(starts.to(device), widths.to(device), block)
    rows = (ragged_rows(lens, tokens, padding), ragged_rows(lens, target, padding))
    force = None
    if data.draw(st.booleans()):
        survival = sorted(data.draw(st.lists(st.integers(0, 2**31), min_size=block - 1, max_size=block - 1)))
        force = accept_kernels.Forced(torch.tensor([survival[::-1]], device=device), alike=False, token_id=None)
    step = (3, data.draw(st.integers(0, 2**31 - 1)))
    out = Accepts(twin, device, *rows, prefix, requests, step, force, most, ragged=ragged)
    for request in range(bs):
        # Forced lengths are drawn by the request's place in its batch: the uniform twin has all of them.
        of_torch = Accepts(
            "torch", device, tokens, target, prefix, requests, step, force, min(most[request], lens[request])
        )
        assert out.committed[request] == of_torch.committed[request]
        assert out.bonus_tokens[request] == of_torch.bonus_tokens[request]
        assert out.new_seq_lens[request] == of_torch.new_seq_lens[request]
        assert out.relay.bonus_tokens[requests[request]] == of_torch.bonus_tokens[request]


def test_a_request_without_rows_pads_the_batch_and_changes_no_other(twin, device):
    ragged = accept_kernels.Ragged(*(v.int() for v in on(device, [0, 3, 3], [3, 0])), 4)
    out = Accepts(twin, device, [5, 6, 7], [6, 7, 9], [10, 20], [2, 0], ragged=ragged)
    assert out.committed[0] == [6, 7, 9] and out.new_seq_lens[0] == 13
    assert out.commit_lens[1] == 1 and out.new_seq_lens[1] == 21


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
