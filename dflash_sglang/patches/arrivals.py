"""Requests that reach a decode server prefilled: this package's worker takes them over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dflash_sglang.patches.apply import replace
from dflash_sglang.sglang_names.scheduler import DFlashDraftInputV2, ScheduleBatch, SpeculativeAlgorithm


def hand_to(arrive: Callable[[ScheduleBatch, torch.Tensor], DFlashDraftInputV2]) -> None:
    """From now on `arrive` makes the draft input of a batch whose requests have KV and first tokens [bs], before
    the batch joins the running one. It runs on the scheduler's stream, behind every forward that was launched."""
    built = SpeculativeAlgorithm.build_disagg_draft_input

    def build_disagg_draft_input(
        algorithm: Any, batch: ScheduleBatch, last_tokens: torch.Tensor, future_map: Any
    ) -> DFlashDraftInputV2:
        draft_input = arrive(batch, last_tokens)
        draft_input.future_indices = built(algorithm, batch, last_tokens, future_map).future_indices
        return draft_input

    replace("arrivals", SpeculativeAlgorithm, build_disagg_draft_input)
