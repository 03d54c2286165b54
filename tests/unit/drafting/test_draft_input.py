"""The reservation of slots and rows, and the draft input that carries a batch's lengths to the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_sglang.drafting.block import BlockBuilder
from dflash_sglang.drafting.draft_input import DFlashDraftInput, SlotReservation
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.sglang_names.scheduler import DFlashVerifyInput

CONTEXT = 100
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
    with mock.patch("dflash_sglang.drafting.draft_input.alloc_for_spec_decode", alloc):
        reserved = reservation(block, row_width, page).reserve(given)
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
        self.mixed, self.prompts = False, 0
        self.slots.serve_chains({32: 4, 64: 2})

    def reserve(self, committed: list[int], allocated: list[int]) -> Any:
        reqs, module = requests_of(committed, allocated), "dflash_sglang.drafting.draft_input"
        allocator = SimpleNamespace(check_decode_capacity=lambda num_tokens, **_: num_tokens <= self.free)
        rows = SimpleNamespace(size=8, available_size=lambda: 8 - len(reqs) - self.prompts)
        batch = SimpleNamespace(reqs=reqs, **OF_A_BATCH | dict(token_to_kv_pool_allocator=allocator))
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


def runner_of(requests: int, translator: Any, name: str = "") -> Any:
    """What a block builder asks of a runner."""
    return SimpleNamespace(
        name=name,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(requests, CONTEXT + 20).int()),
        model_config=SimpleNamespace(context_len=CONTEXT),
        kv_index_translator=translator,
    )


@given(
    committed=st.lists(st.integers(1, CONTEXT + 20), min_size=1, max_size=5),
    width=st.integers(1, 16),
    longer=st.integers(0, 16),
    exact=st.booleans(),
)
def test_a_step_reads_no_more_than_contexts_and_blocks(committed, width, longer, exact):
    """FlashInfer's graphs of width 1 have room for so many keys of each request, its own among them."""
    rows = torch.arange(len(committed))
    translator = mock.Mock()
    runner = runner_of(len(committed), translator)
    slots = StepSlots(len(committed), 16, "cpu")
    slots.start(rows, torch.zeros_like(rows), torch.tensor(committed))
    builder = BlockBuilder(runner, runner, 16, 7, slots, in_place=False)
    bounds = torch.tensor([min(c, CONTEXT - 1) + longer + width for c in committed], dtype=torch.int32)
    batch: Any = SimpleNamespace(
        reqs=committed,
        req_pool_indices=rows,
        seq_lens_cpu=torch.tensor(committed) if exact else None,
        spec_info=SimpleNamespace(nxt_kv_lens_cpu=bounds, nxt_kv_lens_sum=int(bounds.sum())),
    )
    block = builder.build(batch, width)
    prefixes = [min(c, CONTEXT - 1) for c in committed]
    assert block.prefix_lens.tolist() == prefixes
    read = sum(prefixes) + len(committed) * width
    assert read <= len(committed) * width * CONTEXT
    more = 0 if exact else longer
    assert block.kv_len_bounds.tolist() == [prefix + width + more for prefix in prefixes]
    indices, ends, *_ = DFlashVerifyInput(block.ids, block.positions, width).generate_attn_arg_prefill(
        req_pool_indices=rows,
        paged_kernel_lens=block.prefix_lens,
        paged_kernel_lens_sum=block.prefix_bounds_sum,
        translator=translator,
        plan=block.loc_plan,
    )
    assert ends[-1] == read == len(indices) - len(committed) * more


@pytest.mark.parametrize(
    ("width", "captured", "at"),
    [(16, "both", "draft"), (1, "both", "target"), (16, "target", "target"), (16, "neither", None)],
)
def test_a_block_lies_where_the_graph_that_drafts_finds_it(monkeypatch, width, captured, at):
    """Graphs that verify trees have inputs of their own, so those of the target may be another block's."""
    from dflash_sglang.drafting import block

    inputs = {
        name: block.GraphInputs(*(torch.zeros(n, dtype=torch.int64) for n in (32, 32, 32, 2, 2)))
        for name in {"both": ("target", "draft"), "target": ("target",), "neither": ()}[captured]
    }
    monkeypatch.setattr(block.GraphInputs, "of", lambda runner, requests, rows: inputs.get(runner.name))
    target, draft = (runner_of(2, mock.Mock(), name) for name in ("target", "draft"))
    slots, rows = StepSlots(2, 16, "cpu"), torch.arange(2)
    slots.start(rows, rows, rows + 5)
    builder = block.BlockBuilder(target, draft, 16, 7, slots, in_place=True)
    batch: Any = SimpleNamespace(reqs=[0, 1], req_pool_indices=rows, seq_lens_cpu=rows + 5)
    built = builder.build(batch, width)
    assert built.prefix_lens.tolist() == [5, 6]
    at_inputs = {name: of.input_ids.data_ptr() == built.ids.data_ptr() for name, of in inputs.items()}
    assert at_inputs == {name: name == at for name in inputs}


def test_lengths_of_a_step_stand_while_those_of_the_next_are_reserved():
    def reserve(*committed: int) -> Any:
        return slots.reserve(SimpleNamespace(reqs=requests_of([*committed], [*committed]), **OF_A_BATCH))

    slots = reservation(4, 100, 1)
    with mock.patch("dflash_sglang.drafting.draft_input.alloc_for_spec_decode"):
        steps = [reserve(10, 20, 30), reserve(11, 21, 31), reserve(22, 32), reserve(23, 33, 1, 2)]
        assert [step.lengths.tolist() for step in steps] == [[18, 28, 38], [19, 29, 39], [30, 40], [31, 41, 9, 10]]
        again = reserve(24, 34)  # in the buffers of the first
    assert again.lengths.tolist() == [32, 42]
    assert [step.lengths.tolist() for step in steps[1:]] == [[19, 29, 39], [30, 40], [31, 41, 9, 10]]
    assert [step.committed.tolist() for step in steps] == [[10, 20, 30], [11, 21, 31], [22, 32], [23, 33, 1, 2]]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_draft_input_is_filtered_and_merged_with_its_batch(overlap):
    """Tokens and lengths are the relay's, by the requests' rows; without overlap SGLang names no rows."""

    def of(*requests: int) -> DFlashDraftInput:
        made = DFlashDraftInput.create(torch.tensor(requests) + 100, torch.tensor(requests) + 200, None)
        made.future_indices = torch.tensor(requests) if overlap else None
        return made

    running = of(1, 2, 3)
    running.nxt_kv_lens_cpu, running.nxt_kv_lens_sum = torch.tensor([5, 6, 7]), 18
    running.filter_batch(torch.tensor([0, 2]), [0, 2])
    running.merge_batch(of(8))
    assert (running.future_indices.tolist() == [1, 3, 8]) if overlap else (running.future_indices is None)
    assert running.nxt_kv_lens_cpu is running.nxt_kv_lens_sum is None, "a reservation is of one step's batch"
