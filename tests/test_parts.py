"""Blocks that are verified in part: packed rows, their layout, and which batches need whole blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

BLOCK, WIDTH, LENS = 8, 4, (2, 1, 4)


def block_of(bs: int) -> Any:
    from dflash_sglang.drafting.block import Block, Rows

    rows = torch.arange(bs * WIDTH)
    ids, positions, slots = (rows.view(bs, WIDTH) + offset for offset in (100, 200, 300))
    return Block(
        ids,
        positions,
        slots,
        prefix_lens=torch.arange(bs),
        requests=torch.tensor([3, 1, 2]),
        kv_len_bounds=torch.arange(bs) + WIDTH,
        kv_len_bounds_sum=0,
        loc_plan=SimpleNamespace(seq_lens_cpu="lengths"),
        rows=Rows(rows, rows, rows),
    )


def packed(captured: int | None) -> Any:
    from dflash_sglang.drafting.parts import RowPacker
    from dflash_sglang.scheduling.width.shares import Shares

    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(6, 10, dtype=torch.int32)),
        kv_index_translator=SimpleNamespace(plan=lambda **asked: asked),
    )
    asked = []

    def captured_requests(tokens: int, requests: int) -> int | None:
        asked.append((tokens, requests))
        return captured

    packer = RowPacker(runner, BLOCK, captured_requests)
    batch = SimpleNamespace(req_pool_indices=torch.tensor([3, 1, 2]))
    proposals = torch.arange(3 * WIDTH).view(3, WIDTH) + 1000
    for buffer in packer._buffers:
        buffer.fill_(-7)
    whole = block_of(3)
    block = packer.pack(batch, whole, proposals, Shares(np.array(LENS)))
    assert asked == [(7, 3)]
    assert block.size == WIDTH and block.ids is whole.ids and whole.part is None
    return block


ROWS = [0, 1, 4, 8, 9, 10, 11]


def test_without_a_graph_a_step_has_the_rows_that_are_verified_and_no_other() -> None:
    block = packed(captured=None)
    assert block.rows.ids.tolist() == [1000 + row for row in ROWS]
    assert block.rows.positions.tolist() == [200 + row for row in ROWS]
    assert block.rows.slots.tolist() == [300 + row for row in ROWS]
    layout, ragged = block.part.layout, block.part.ragged
    assert layout.verify_lens.tolist() == list(LENS) == layout.verify_lens_cpu
    assert layout.qo_indptr_device.tolist() == [0, 2, 3, 7] and layout.extend_start_loc.tolist() == [0, 2, 3]
    assert layout.graph_num_tokens == layout.total_verify_tokens == 7
    assert ragged.starts.tolist()[:3] == [0, 2, 3] and ragged.lens.tolist() == list(LENS)
    assert ragged.block == BLOCK
    assert block.loc_plan["write_virtual"].tolist() == block.rows.slots.tolist()
    assert block.loc_plan["read_extent"] == WIDTH and block.loc_plan["seq_lens_cpu"] == "lengths"


def test_requests_that_a_graph_has_more_have_no_rows() -> None:
    block = packed(captured=5)
    for rows, offset in zip(block.rows, (1000, 200, 300), strict=True):
        assert rows.tolist() == [offset + row for row in ROWS]
    layout = block.part.layout
    assert layout.verify_lens.tolist() == [*LENS, 0, 0] and layout.bs == 5
    assert layout.qo_indptr_device.tolist() == [0, 2, 3, 7, 7, 7]
    assert layout.graph_num_tokens == 7 and layout.cap == BLOCK
    assert block.part.ragged.lens.tolist() == list(LENS)


@pytest.mark.parametrize(
    "what", [None, "sampled", "penalised", "masked", "grammar", "logprobs", "bias", "processor"]
)
def test_a_batch_whose_logits_are_looked_at_row_by_row_needs_whole_blocks(what: str | None) -> None:
    from dflash_sglang.verify.verifier import Verifier

    info = SimpleNamespace(
        is_all_greedy=what != "sampled",
        acc_additive_penalties=torch.zeros(1) if what == "penalised" else None,
        sampling_mask_batch_indices=[0] if what == "masked" else None,
        logit_bias=torch.zeros(1) if what == "bias" else None,
        has_custom_logit_processor=what == "processor",
    )
    batch = SimpleNamespace(sampling_info=info, has_grammar=what == "grammar", return_logprob=what == "logprobs")
    assert Verifier.needs_whole_blocks(object.__new__(Verifier), batch) is (what is not None)
