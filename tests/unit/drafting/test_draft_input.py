"""The reservation of slots and rows, and the draft input that carries a batch's lengths to the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from dflash_sglang.drafting.draft_input import STRIDE, SlotReservation

OF_A_BATCH = dict.fromkeys(("tree_cache", "req_to_token_pool", "req_pool_indices", "spec_algorithm"))


def reservation(block: int, row_width: int, page: int) -> Any:
    return SlotReservation(8, block, row_width, page, "cpu")


def requests_of(committed: list[int], allocated: list[int]) -> list[Any]:
    return [
        SimpleNamespace(kv=SimpleNamespace(kv_committed_len=c, kv_allocated_len=a))
        for c, a in zip(committed, allocated, strict=True)
    ]


@given(
    block=st.integers(2, 32),
    page=st.sampled_from([1, 16, 64]),
    context=st.integers(64, 300),
    data=st.data(),
)
def test_a_reservation_covers_two_blocks_in_whole_pages_and_ends_with_the_row(block, page, context, data):
    # As SGLang sizes a row: too short for two blocks past the context limit where pages are of one token.
    row_width = context + (4 + block if page == 1 else 2 * block + page - 1)
    committed = data.draw(st.lists(st.integers(1, context), min_size=1, max_size=8))
    allocated = [-(-(c + data.draw(st.integers(0, 2 * block))) // page) * page for c in committed]
    limit = row_width // page * page
    reqs = requests_of(committed, [min(a, limit) for a in allocated])
    alloc, given = mock.Mock(), SimpleNamespace(reqs=reqs, **OF_A_BATCH)
    given.tree_cache = SimpleNamespace(evictable_size=lambda: data.draw(st.sampled_from([0, 10**5])))
    given.token_to_kv_pool_allocator = SimpleNamespace(
        available_size=lambda: 0, check_decode_capacity=lambda **_: data.draw(st.booleans())
    )
    given.req_to_token_pool, module = None, "dflash_sglang.drafting.draft_input"
    schedule = SimpleNamespace(enable_mixed_chunk=False)
    with (
        mock.patch(f"{module}.alloc_for_spec_decode", alloc),
        mock.patch(f"{module}.get_schedule", lambda: schedule),
    ):
        reserved = reservation(block, row_width, page).reserve(given)
    if alloc.call_args is None:
        assert reserved.lengths.tolist() == [req.kv.kv_allocated_len for req in reqs]
        assert all(
            a >= min(c + 2 * block, limit) for c, a in zip(committed, reserved.lengths.tolist(), strict=True)
        )
        return
    asked = alloc.call_args.kwargs
    assert reserved.committed.tolist() == committed
    assert reserved.committed_sum == sum(committed)
    before, lengths = [req.kv.kv_allocated_len for req in reqs], reserved.lengths.tolist()
    assert asked["cur_kv_lens"].tolist() == asked["cur_kv_lens_cpu"].tolist() == before
    assert asked["nxt_kv_lens"].tolist() == asked["nxt_kv_lens_cpu"].tolist() == lengths
    assert asked["num_needed_tokens"] == sum(lengths) - sum(before)
    assert reserved.lengths_sum == sum(lengths)
    for c, a, r in zip(committed, before, lengths, strict=True):
        assert a <= r <= limit
        assert r % page == 0
        assert r == limit or r >= c + 2 * block


class Pool:
    """Requests of one or more blocks in a row of 300 tokens; free slots of a pool."""

    def __init__(self, block: int, page: int, free: int) -> None:
        self.slots, self.block, self.page, self.free = reservation(block, 300, page), block, page, free
        self.mixed, self.prompts, self.ample, self.cached = False, 0, 0, 0
        self.slots.serve_chains({32: 4, 64: 2})

    def reserve(self, committed: list[int], allocated: list[int]) -> Any:
        reqs, module = requests_of(committed, allocated), "dflash_sglang.drafting.draft_input"
        allocator = SimpleNamespace(
            check_decode_capacity=lambda num_tokens, **_: num_tokens <= self.free,
            available_size=lambda: self.ample,
        )
        rows = SimpleNamespace(size=8, available_size=lambda: 8 - len(reqs) - self.prompts)
        batch = SimpleNamespace(reqs=reqs, **OF_A_BATCH | dict(token_to_kv_pool_allocator=allocator))
        batch.tree_cache = SimpleNamespace(evictable_size=lambda: self.cached)
        batch.req_to_token_pool, schedule = rows, SimpleNamespace(enable_mixed_chunk=self.mixed)
        with mock.patch(f"{module}.alloc_for_spec_decode"), mock.patch(f"{module}.get_schedule", lambda: schedule):
            reserved = self.slots.reserve(batch)
        return reserved.chain, reserved.lengths.tolist()


def test_long_chains_are_reserved_for_few_requests_where_their_rows_and_free_slots_have_room() -> None:
    for committed, free, chain in (
        ([10], 1000, 64),
        ([10, 20], 1000, 64),
        ([10, 20, 30], 1000, 32),
        ([10] * 4, 1000, 32),
        ([10] * 5, 1000, 0),
        ([10], 16 + 64 + 16, 64),
        ([10], 16 + 64 + 15, 0),
        ([300 - 96], 1000, 64),
        ([300 - 95], 1000, 0),
    ):
        got, lengths = Pool(16, 1, free).reserve(committed, committed)
        ahead = 16 + (chain + 16 if chain else 16)
        assert (got, lengths) == (chain, [min(c + ahead, 300) for c in committed]), (committed, free)


def test_slots_are_taken_in_strides_where_many_are_free_or_cached() -> None:
    pool = Pool(16, 1, 10**6)
    pool.slots.serve_chains({})
    for ample, allocated, reserved in (
        (8 * (32 + STRIDE), 10, 10 + 32 + STRIDE),
        (8 * (32 + STRIDE) - 1, 10, 10 + 32),
        (10**6, 10 + 32, 10 + 32),
        (10**6, 10 + 31, 10 + 32 + STRIDE),
    ):
        for cached in (0, ample - 5 if ample > 5 else 0):
            pool.ample, pool.cached = ample - cached, cached
            assert pool.reserve([10], [allocated]) == (0, [reserved])
    assert pool.reserve([250], [250]) == (0, [300]), "the row's end"
    assert pool.reserve([10, 90], [10, 122])[1] == [10 + 32 + STRIDE, 122 + STRIDE], "all, when one lacks slots"
    pool.free = 31 + STRIDE
    assert pool.reserve([10], [10]) == (0, [10 + 32]), "the cache gives up less than it counts"


def test_slots_that_a_prompt_in_progress_counts_on_are_reserved_for_no_long_chain() -> None:
    """SGLang prepares the decode batch of a mixed prefill, whose next part ends the scheduler without slots."""
    for mixed, prompts, chain in ((True, 1, 0), (True, 0, 64), (False, 1, 64)):
        pool = Pool(16, 1, 1000)
        pool.mixed, pool.prompts = mixed, prompts
        assert pool.reserve([10], [10])[0] == chain


@given(
    page=st.sampled_from([1, 16]),
    steps=st.lists(
        st.tuples(st.integers(1, 5), st.booleans(), st.integers(1, 64), st.booleans()), min_size=1, max_size=12
    ),
)
def test_every_step_finds_the_slots_that_it_writes_and_takes_no_more_than_sglang_counts_on(page, steps):
    """SGLang looks for two blocks past what is known of a request. Overlapped, that lacks what the step before
    commits; it does not after a prefill, whose request has just joined, and without overlap."""
    pool, block = Pool(16, page, 0), 16
    known, really, allocated = 10, 10, 10
    for requests, has_room, commits, overlapped in steps:
        pool.free = 10**6 if has_room else 0
        known = known if overlapped else really
        committed, before = [known] * requests, [allocated] * requests
        if not overlapped:
            committed, before = [*committed, 17], [*before, 17]
        chain, lengths = pool.reserve(committed, before)
        for of, had, length in zip(committed, before, lengths, strict=True):
            counted = -(-max(of + 2 * block - had, 0) // page) * page
            assert chain or length - had <= counted + (page - 1 if page > 1 else 0), (length, had, counted)
        rows = chain or block
        if really + rows > pool.slots.row_limit:
            break  # blocks near the end of a row are the context's limit
        assert lengths[0] >= really + rows
        known, allocated = really, lengths[0]
        really += min(commits, rows)
