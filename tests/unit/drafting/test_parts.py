"""Blocks that are verified in part: packed rows, their layout, and which batches need whole blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dflash_sglang.checkpoint import VocabularySpec
from dflash_sglang.checkpoint.family_specs import DRAWN_FROM
from dflash_sglang.drafting.block import Block, Rows
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.proposer import Proposer, why_no_candidates
from dflash_sglang.drafting.row_reader import TREE_CANDIDATES, RowReader
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.kernels.head.pack_shard import Candidates
from dflash_sglang.models.head.draft_head import DraftHead
from dflash_sglang.verify.acceptance import Acceptor
from dflash_sglang.verify.ragged import RaggedVerify
from dflash_sglang.verify.verifier import Verifier

BLOCK, WIDTH, LENS = 8, 4, (2, 1, 4)


def block_of(bs: int) -> Any:
    rows = torch.arange(bs * WIDTH)
    ids, positions, slots = (rows.view(bs, WIDTH) + offset for offset in (100, 200, 300))
    return Block(
        ids,
        positions,
        slots,
        prefix_lens=torch.arange(bs),
        requests=torch.tensor([3, 1, 2]),
        kv_len_bounds=torch.arange(bs) + WIDTH,
        prefix_bounds_sum=0,
        loc_plan=SimpleNamespace(seq_lens_cpu="lengths"),
        rows=Rows(rows, rows, rows),
    )


def packed(captured: int | None) -> Any:
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(6, 10, dtype=torch.int32)),
        kv_index_translator=SimpleNamespace(plan=lambda **asked: asked),
    )
    asked = []

    def captured_requests(tokens: int, requests: int) -> int | None:
        asked.append((tokens, requests))
        return captured

    ragged = RaggedVerify(runner, BLOCK, captured_requests)
    batch = SimpleNamespace(req_pool_indices=torch.tensor([3, 1, 2]))
    tokens = torch.arange(3 * WIDTH).view(3, WIDTH) + 1000
    for buffer in ragged._buffers:
        buffer.fill_(-7)
    logprobs = torch.tensor([[-0.1, -9.0, -9.0], [-8.0, -0.1, 0.0], [-0.1, -0.1, -0.1]])
    chosen = ragged.choose(batch, block_of(3), Proposals.certain(tokens, logprobs=logprobs), sum(LENS))
    assert asked == [(7, 3)]
    with pytest.raises(ValueError, match="expected proposals with logprobs"):
        ragged.choose(batch, block_of(3), Proposals.certain(tokens), sum(LENS))
    return chosen


ROWS = [0, 1, 4, 8, 9, 10, 11]


@pytest.mark.parametrize("captured", [None, 5])
def test_a_step_has_the_rows_that_are_verified_and_requests_that_a_graph_has_more_have_none(captured) -> None:
    chosen, more = packed(captured), [] if captured is None else [0, 0]
    for rows, offset in zip(chosen.rows, (1000, 200, 300), strict=True):
        assert rows.tolist() == [offset + row for row in ROWS]
    layout, ragged = chosen.layout, chosen.ragged
    assert layout.verify_lens.tolist() == [*LENS, *more] and layout.bs == 3 + len(more)
    assert layout.qo_indptr_device.tolist() == [0, 2, 3, 7, *[7 for _ in more]]
    assert layout.extend_start_loc.tolist()[:3] == [0, 2, 3]
    assert layout.verify_lens_cpu == (list(LENS) if captured is None else None)
    assert layout.graph_num_tokens == layout.total_verify_tokens == 7
    assert ragged.starts.tolist()[:3] == [0, 2, 3] and ragged.lens.tolist() == list(LENS)
    assert ragged.block == BLOCK and (captured is None or layout.cap == BLOCK)
    assert chosen.loc_plan["write_virtual"].tolist() == chosen.rows.slots.tolist()
    assert chosen.loc_plan["read_extent"] == WIDTH and chosen.loc_plan["seq_lens_cpu"] == "lengths"


@pytest.mark.parametrize(
    "what", [None, "sampled", "penalised", "masked", "grammar", "logprobs", "bias", "processor", "sanitised"]
)
def test_what_is_adjusted_has_no_trees_and_what_is_reported_or_processed_by_the_host_no_ragged_steps_either(
    what: str | None,
) -> None:
    info = SimpleNamespace(
        is_all_greedy=what != "sampled",
        acc_additive_penalties=torch.zeros(1) if what == "penalised" else None,
        sampling_mask_batch_indices=[0] if what == "masked" else None,
        logit_bias=torch.zeros(1) if what == "bias" else None,
        has_custom_logit_processor=what == "processor",
    )
    batch = SimpleNamespace(sampling_info=info, has_grammar=what == "grammar", return_logprob=what == "logprobs")
    verifier = object.__new__(Verifier)
    verifier._sanitizes = what == "sanitised"
    batch.spec_info = SimpleNamespace(no_trees=None)
    ragged = {"masked": "reported", "logprobs": "reported", "processor": "adjusted"}.get(what)
    trees = None if what in (None, "sampled") else ragged or "adjusted"
    assert verifier.excluded(batch) == (ragged, trees, "sampled" if what == "sampled" else trees)
    if what is None:
        batch.spec_info.no_trees = "pool_full"
        assert verifier.excluded(batch) == (None, "pool_full", None)


@pytest.mark.parametrize("drawn", [False, True])
def test_proposals_come_with_their_chances_and_with_candidates_where_trees_are_grown(drawn: bool) -> None:
    """Widest blocks of at most 2 requests, counted with a graph's padding. Drawn or not, over all tokens."""
    from torch import nn

    torch.manual_seed(0)
    linear, ids = nn.Linear(8, 40, bias=False), torch.arange(40) * 3
    head = DraftHead(linear, VocabularySpec(None, None, None, 1.0, 2.0, 3.0), ids)
    reader = RowReader(head, None, 4, 4, drawn, "cpu", tree_requests=2)
    places = {of.data_ptr() for of in reader._candidates}
    for padded, steps, for_trees in ((1, 4, True), (2, 4, True), (2, 3, False), (3, 4, False), (4, 4, False)):
        hidden, tokens = torch.randn(padded, steps, 8), torch.zeros((padded, steps + 1), dtype=torch.int64)
        with torch.no_grad():
            expected = (3.0 * torch.tanh(linear(hidden) * 2.0 / 3.0)).log_softmax(-1).sort(descending=True)
            reader.write(hidden, tokens)
        assert tokens[:, 1:].tolist() == ids[expected.indices[..., 0]].tolist()
        for bs in range(1, padded + 1):
            logprobs, best = reader.read(bs, steps, padded)
            torch.testing.assert_close(logprobs, expected.values[:bs, :, 0])
            assert (best is not None) == for_trees
            if best is not None:
                count = DRAWN_FROM if drawn else TREE_CANDIDATES
                assert best.ids.tolist() == ids[expected.indices[:bs, :, :count]].tolist()
                torch.testing.assert_close(best.logprobs, expected.values[:bs, :, :count])
                assert best.ids.is_contiguous() and best.logprobs.is_contiguous()
                assert {of.data_ptr() for of in best} == places, "where a graph writes"


def drafts(edges: object = None, all_rows: object = None, anchor_proposes: bool = False) -> Any:
    spec = SimpleNamespace(anchor_proposes=anchor_proposes)
    return SimpleNamespace(edges=edges, head=SimpleNamespace(all_rows=all_rows), spec=spec)


def test_a_draft_without_candidates_is_not_asked_for_them() -> None:
    for model, reason in (
        (drafts(edges=object()), "the draft's edges score walks"),
        (drafts(all_rows=object()), "share the draft's head"),
        (drafts(anchor_proposes=True), "the anchor's row proposes"),
    ):
        assert reason in str(why_no_candidates(model))
        with pytest.raises(ValueError, match=f"tree_requests=4: expected 0, because .*{reason}"):
            Proposer(SimpleNamespace(), model, BLOCK, None, drawn=False, tree_requests=4)
    assert why_no_candidates(drafts()) is None


def test_proposals_are_worth_nothing_beyond_a_requests_limit() -> None:
    acceptor, beyond = Acceptor(StepSlots(6, 4, "cpu")), float("-inf")
    said = Proposals.certain(torch.zeros((3, 3)), logprobs=torch.full((3, 2), -7.0))
    said = said._replace(best=Candidates(torch.zeros(3, 2, 2), torch.full((3, 2, 2), -7.0)))
    requests = torch.tensor([2, 3, 4])
    assert acceptor.clip_to_limits(said, requests) is said
    for limits, expected in (
        ([2, 1], [[-7.0, -7.0], [beyond, beyond], [-7.0, beyond]]),
        ([3, 3], [[-7.0, -7.0]] * 3),
    ):
        acceptor.set_max_commit(np.array([4, 3]), np.array(limits))
        clipped = acceptor.clip_to_limits(said, requests)
        assert clipped.logprobs.tolist() == expected
        assert clipped.best.logprobs.tolist() == [[[one] * 2 for one in row] for row in expected]


@pytest.mark.parametrize("ragged", [False, True])
def test_a_graph_that_is_padded_beyond_the_rows_of_requests_accepts_those_that_have_one(ragged: bool) -> None:
    """Ranks that share a batch of 5 take parts of one size each: 8 requests, of which 3 are nobody's."""
    rows, padded, block = 6, 8, 4
    requests = torch.tensor([1, 2, 3, 4, 5, 0, 0, 0])
    blocks = torch.arange(padded * block).view(padded, block)
    target_ids, prefix_lens = torch.roll(blocks, -1, dims=1), torch.arange(padded) + 10
    lens = torch.tensor([block] * 5 + [0] * 3, dtype=torch.int32)
    starts = torch.cat([lens.new_zeros(1), lens.cumsum(0).int()])
    told = []
    for live in (slice(None), slice(5)):
        acceptor = Acceptor(StepSlots(rows, block, "cpu"))
        acceptor.slots.current.copy_(torch.tensor(acceptor.slots.next()))
        if ragged:
            parts = Ragged(starts, lens[live], block)
            ids = [one[:5].reshape(-1) for one in (blocks, target_ids)]
        else:
            parts, ids = None, [one[live] for one in (blocks, target_ids)]
        acceptor.accept(*ids, prefix_lens[live], requests[live], parts)
        told.append(acceptor.slots.outcome(5, block))
        assert not acceptor.slots._packed[acceptor.slots._place + 1 :].any(), "the places of other steps"
    for name in set(told[0]._fields) - {"packed"}:
        assert torch.equal(getattr(told[0], name), getattr(told[1], name)), name
