"""Rows that are kept of requests, results that outlive their step, and slots that a graph may not write to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.verify import tables
from dflash_sglang.verify.acceptance import Acceptor
from dflash_sglang.verify.graph_tail import VerifyTail
from dflash_sglang.verify.step_result import StepResult
from dflash_sglang.verify.target_logits import TargetLogits
from tests.support import sglang_layers as layers

BLOCK, REQUESTS = 4, 12


@pytest.mark.parametrize(
    ("requests", "ranks", "receiving", "rows"),
    [(48, 1, None, 49), (48, 5, None, 10), (2, 4, None, 2), (16, 1, 32, 49)],
    ids=["alone", "divided", "fewer than ranks", "decode server"],
)
def test_a_rank_has_a_row_for_its_part_of_the_requests_and_one_for_padding(
    monkeypatch, requests, ranks, receiving, rows
):
    """As SGLang makes req_to_token; it may make fewer."""
    monkeypatch.setattr(tables, "get_schedule", lambda: SimpleNamespace(max_running_requests=requests))
    monkeypatch.setattr(tables, "get_parallel", lambda: SimpleNamespace(attn_dp_size=ranks))
    extra = SimpleNamespace(disaggregation_decode_extra_slots=receiving)
    monkeypatch.setattr(tables, "get_disagg", lambda: extra)
    assert tables.most_rows() == rows
    with pytest.raises(ValueError, match=f"found {rows + 1} rows, expected at most .* --max-running-requests"):
        StepSlots(rows, BLOCK, "cpu").fit(rows + 1)


def test_a_result_that_is_read_two_steps_late_is_the_one_of_its_step():
    """Steps write where the ones before them wrote."""
    acceptor = Acceptor(StepSlots(REQUESTS, BLOCK, layers.DEVICE))
    requests, rows = torch.arange(1, 3, device=layers.DEVICE), torch.arange(2 * BLOCK, device=layers.DEVICE)
    logprobs, mass = (torch.zeros((2, n), device=layers.DEVICE) for n in (BLOCK - 1, 6))
    promised, lens = torch.zeros(2, device=layers.DEVICE), torch.zeros(2, dtype=torch.int32, device=layers.DEVICE)
    buffers = dict(logprobs=logprobs, mass=mass, promised=promised, lens=lens)

    def step(number: int) -> Any:
        tokens = (rows.view(2, BLOCK) + number).contiguous()
        target_ids = tokens + 1
        target_ids[:, number] = 99
        for buffer in buffers.values():
            buffer.fill_(number + 1)
        acceptor.slots.current.fill_(acceptor.slots.next())
        acceptor.accept(tokens, target_ids, 10 * requests, requests)
        forward = SimpleNamespace(
            logits_output=None, can_run_cuda_graph=True, routed_experts_output=None, indexer_topk_output=None
        )
        verified = SimpleNamespace(accepted=acceptor.slots.outcome(2, BLOCK), forward=forward)
        candidates = tokens[:, 1:, None]
        proposals = Proposals(tokens, candidates, candidates, logprobs, promised=promised)
        of: Any = SimpleNamespace(
            ragged=Ragged(lens, lens, BLOCK), paths=SimpleNamespace(tree=SimpleNamespace(mass=mass))
        )
        return StepResult.from_verified(verified, proposals, of, mock.Mock(), chances=True)

    results = [step(number) for number in range(BLOCK)]
    for number, result in enumerate(results):
        result.copy_done = mock.Mock()
        result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
        assert result.accept_lens.tolist() == [number + 1] * 2
        accepted = result.next_token_ids.view(2, BLOCK)[:, : number + 1].tolist()
        assert accepted == [[*range(first + 1, first + number + 1), 99] for first in (number, number + BLOCK)]
        assert result.new_seq_lens.tolist() == [10 + number + 1, 20 + number + 1]
    drafted = [result.drafted() for result in results]
    for result in results:
        result.packed.zero_()  # on a CPU a later step writes there
    for number, of in enumerate(drafted):
        for name, buffer in buffers.items():
            assert getattr(of, name).tolist() == torch.full_like(buffer, number + 1).tolist(), name


def test_slots_that_a_pool_renames_are_left_to_the_eager_write():
    space = SimpleNamespace(write=lambda ids: ids)
    runner: Any = SimpleNamespace(
        capture_tail_hooks=[],
        kv_index_translator=SimpleNamespace(space=lambda kind: space),
        model=torch.nn.Module(),
        model_config=SimpleNamespace(vocab_size=11),
    )
    acceptor = Acceptor(StepSlots(REQUESTS, BLOCK, layers.DEVICE))
    assert not VerifyTail(runner, runner, TargetLogits(runner), acceptor, mock.Mock()).writes_context
