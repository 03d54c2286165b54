"""What verification keeps of requests: taken once, for as many as can run, before SGLang sizes the KV pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

BLOCK, VOCAB = 4, 30


@pytest.mark.parametrize(
    ("requests", "ranks", "receiving", "rows"),
    [(48, 1, None, 49), (48, 5, None, 10), (2, 4, None, 2), (16, 1, 32, 49)],
    ids=["alone", "divided", "fewer than ranks", "decode server"],
)
def test_a_rank_has_a_row_for_its_part_of_the_requests_and_one_for_padding(
    monkeypatch: pytest.MonkeyPatch, requests: int, ranks: int, receiving: int | None, rows: int
) -> None:
    """As SGLang makes req_to_token."""
    from dflash_sglang.verify import tables

    monkeypatch.setattr(tables, "get_schedule", lambda: SimpleNamespace(max_running_requests=requests))
    monkeypatch.setattr(tables, "get_parallel", lambda: SimpleNamespace(attn_dp_size=ranks))
    extra = SimpleNamespace(disaggregation_decode_extra_slots=receiving)
    monkeypatch.setattr(tables, "get_disagg", lambda: extra)
    assert tables.most_rows() == rows


@pytest.mark.parametrize("rows", [7, 3], ids=["as expected", "SGLang has made fewer"])
def test_the_relay_has_the_rows_of_req_to_token_in_the_memory_that_was_taken(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """SGLang takes a relay of that size alone."""
    from dflash_sglang.drafting import step_slots
    from dflash_sglang.verify.adjustments import Adjustments
    from dflash_sglang.verify.tables import Tables

    offered: list[Any] = []
    monkeypatch.setattr(step_slots, "offer_future_relay_buffers", offered.append)
    acceptor = Tables.taken(step_slots.StepSlots(7, BLOCK, "cpu"), Adjustments(7, BLOCK, VOCAB, "cpu")).acceptor
    memory = [tensor.data_ptr() for tensor in acceptor.slots.relay]
    acceptor.slots.fit(rows)
    relay = offered[-1]
    assert [len(tensor) for tensor in (relay.new_seq_lens, relay.output_tokens)] == [rows, rows]
    assert [tensor.data_ptr() for tensor in acceptor.slots.relay] == memory
    assert relay.new_seq_lens.data_ptr() == memory[0] and relay.output_tokens.data_ptr() == memory[1]
    ids, row = torch.arange(BLOCK)[None], torch.tensor([rows - 1])
    acceptor.slots.current.copy_(torch.tensor(acceptor.slots.next()))
    acceptor.accept(ids, ids + 1, torch.tensor([9]), row)
    assert relay.new_seq_lens[rows - 1] == 9 + BLOCK and relay.output_tokens[rows - 1] == BLOCK
    with pytest.raises(ValueError, match="found 8 rows, expected at most .* --max-running-requests"):
        acceptor.slots.fit(8)


def test_a_step_may_commit_longer_chains_of_few_requests_than_blocks_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dflash_sglang.drafting import step_slots
    from dflash_sglang.verify.acceptance import Acceptor

    monkeypatch.setattr(step_slots, "offer_future_relay_buffers", lambda relay: None)
    slots = step_slots.StepSlots(3, BLOCK, "cpu", {8: 4, 16: 2})
    acceptor, chain, rows = Acceptor(slots), 16, torch.tensor([1, 2])
    assert slots.longest == chain
    acceptor.set_max_commit(np.array([2]), np.array([9]))
    slots.current.copy_(torch.tensor(slots.next()))
    ids = torch.arange(chain).repeat(2, 1)
    acceptor.accept(ids, ids + 1, torch.tensor([5, 5]), rows)
    done = slots.outcome(2, chain)
    assert done.commit_lens.tolist() == [chain, 9]
    assert done.target_ids.tolist() == (ids + 1).tolist()
    assert done.packed[-2 * chain :].tolist() == (ids + 1).flatten().tolist()
    padded = torch.arange(8).repeat(4, 1)  # a graph's, with a request that is nobody's
    acceptor.accept(padded, padded + 1, torch.tensor([5] * 4), torch.tensor([1, 2, 0, 0]))
    assert slots.outcome(2, 8).commit_lens.tolist() == [8, 8]
