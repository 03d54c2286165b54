"""An IDLE batch: empty results of the usual types, the target's collectives where ranks depend on them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


class Parts:
    """Proposer and verifier: which of them took part, in order."""

    def __init__(self) -> None:
        self.took_part: list[str] = []

    def propose_idle(self, batch, width) -> None:
        assert width == 16
        self.took_part.append("draft")

    def verify_idle(self, batch, width) -> None:
        assert width == 16
        self.took_part.append("target")


@pytest.mark.parametrize("data_parallel_attention", [False, True])
def test_an_idle_step_publishes_nothing_and_takes_part_only_for_data_parallel_neighbours(
    monkeypatch, data_parallel_attention
):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from dflash_sglang import worker as module
    from dflash_sglang.drafting.draft_input import DFlashDraftInput

    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(attn_dp_enabled=data_parallel_attention))
    worker = object.__new__(module.DFlashWorker)
    worker.device, worker.block_size, worker.width, worker._reservation = "cpu", 16, 16, None
    worker._proposer = worker._verifier = parts = Parts()
    worker._widths = SimpleNamespace(next=lambda batch: SimpleNamespace(width=16))
    published: list[torch.Tensor] = []
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE, is_extend_in_batch=False)
    result = worker.forward_batch_generation(batch, on_publish=published.append)
    assert parts.took_part == (["draft", "target"] if data_parallel_attention else [])
    assert [lens.tolist() for lens in published] == [[]]
    assert result.next_token_ids.tolist() == result.accept_lens.tolist() == result.new_seq_lens.tolist() == []
    assert (result.accept_lens.dtype, result.next_token_ids.dtype) == (torch.int32, torch.int64)
    assert isinstance(result.next_draft_input, DFlashDraftInput)
    assert result.next_draft_input.bonus_tokens.shape == (0,)
