"""Attention backends of blocks: room beyond the context, and a window for each row in plans of FlashInfer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.drafting.block import longest_prefix
from dflash_sglang.patches import attention_room
from dflash_sglang.patches.attention_room import plan_windows


def flashinfer_sees(context: int, block: int, window: int, planned: bool) -> torch.Tensor:
    """[block, context + block] bool: SGLang's plan of a verify, under FlashInfer's rule for keys and windows."""
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferIndicesUpdaterPrefill, WrapperDispatch

    plans: list[dict[str, Any]] = []
    updater: Any = object.__new__(FlashInferIndicesUpdaterPrefill)
    updater.sliding_window_size, updater.prefill_wrapper_ragged, updater._swa_kv_pool = window - 1, None, None
    updater.kv_indptr, updater.qo_indptr = [torch.zeros(2), torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]

    def begin(ragged: Any, paged: Any, rows: Any, lens: Any, total: Any, *args: Any, **kwargs: Any) -> None:
        plans.append({"prefix": int(lens), "window_left": kwargs.get("window_left", -1)})

    updater.call_begin_forward = begin
    backend = SimpleNamespace(dispatch_reason=WrapperDispatch.SLIDING_WINDOW, indices_updater_prefill=updater)
    assert not planned or plan_windows(backend)
    lens, spec_info = torch.tensor([context]), SimpleNamespace()
    batch = (torch.tensor([1]), lens, lens + block, context)
    updater.update_sliding_window(*batch, None, [None, None], False, None, spec_info, plan=None)
    sliding, full = plans
    assert full == {"prefix": context, "window_left": -1}
    total = sliding["prefix"] + block
    keys, rows = torch.arange(total), torch.arange(block)[:, None]
    seen = torch.ones((block, total), dtype=torch.bool)
    if sliding["window_left"] >= 0:
        seen = keys + block + sliding["window_left"] >= total + rows
    return torch.cat([torch.zeros((block, context + block - total), dtype=torch.bool), seen], dim=1)


@pytest.mark.parametrize(("context", "block", "window"), [(40, 8, 16), (16, 8, 16), (9, 8, 16), (300, 16, 128)])
def test_flashinfer_masks_each_row_of_a_draft_by_its_own_window(context, block, window):
    distance = torch.arange(context, context + block)[:, None] - torch.arange(context + block)
    assert torch.equal(flashinfer_sees(context, block, window, planned=True), distance < window)
    beyond = flashinfer_sees(context, block, window, planned=False) & (distance >= window)
    first = context - window + 1  # in the window of row 0, if it is a position
    assert beyond.sum(dim=1).tolist() == [max(first + row, 0) - max(first, 0) for row in range(block)]


def test_backends_without_sliding_layers_keep_their_plans():
    assert not plan_windows(SimpleNamespace())
    assert not plan_windows(SimpleNamespace(dispatch_reason=None))


def test_backends_of_both_models_have_room_for_a_block_that_ends_beyond_the_context(monkeypatch):
    """FlashInfer's MLA graphs would write behind what they hold of a request, FlashAttention's read behind it."""
    monkeypatch.setattr(attention_room, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=8))
    runner: Any = SimpleNamespace(model_config=SimpleNamespace(context_len=100))
    room: list[int] = []
    attention_room.init_attention_backends(lambda runner: room.append(runner.model_config.context_len), runner)
    assert room == [longest_prefix(runner) + 8] and runner.model_config.context_len == 100
