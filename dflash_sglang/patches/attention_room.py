"""What attention backends plan for blocks: room behind a context, and windows that are exact for every row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dflash_sglang.patches.apply import replace, replaced
from dflash_sglang.sglang_names.scheduler import ModelRunner, get_spec


@contextmanager
def room_for_blocks(runner: ModelRunner) -> Iterator[None]:
    """Backends that are made meanwhile have room for blocks that end beyond the context.

    A block may start at the last token of a context (`longest_prefix`). SGLang's backends size page tables and
    lists of slots for the context alone: the kernels of FlashInfer's MLA graphs would write behind the list, and
    those of FlashAttention 3 would read pages behind the table. Rows of `req_to_token` are wide enough.
    """
    config = runner.model_config
    longest = config.context_len + get_spec().speculative_num_draft_tokens - 1
    with replaced("attention-context", config, longest):
        yield


def init_attention_backends(original: Callable[[ModelRunner], None], runner: ModelRunner) -> None:
    """AROUND ModelRunner.init_attention_backends, of the target and the draft."""
    with room_for_blocks(runner):
        original(runner)


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
