"""Windows of sliding layers in FlashInfer's plans of a block, exact for every row."""

from __future__ import annotations

from typing import Any

import torch

from dflash_sglang.patches.apply import replace


def plan_windows(backend: Any) -> bool:
    """Make a FlashInfer backend mask the keys to the left of each row's window.

    SGLang plans a verify without a window: it cuts the keys of a request once, by the window of the block's first
    row, so that row r sees r keys too many. A plan that names the window masks each row by itself. Call it once
    for each backend, before its graphs are captured. All sliding layers have the same window.

    backend: any of SGLang's. Returns whether it is one that needed this.
    """
    reason = getattr(backend, "dispatch_reason", None)
    if reason is None or reason.name != "SLIDING_WINDOW":
        return False
    updater = backend.indices_updater_prefill
    begin, window_left = updater.call_begin_forward, updater.sliding_window_size
    sliding: torch.Tensor = updater.kv_indptr[0]  # tells the sliding layers' plan from the full layers'

    def call_begin_forward(*args: Any, **kwargs: Any) -> None:
        if any(arg is sliding for arg in args):
            kwargs["window_left"] = window_left
        begin(*args, **kwargs)

    replace("flashinfer-windows", updater, call_begin_forward)
    return True
