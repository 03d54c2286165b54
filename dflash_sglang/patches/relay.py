"""Reads of the relay between overlapped steps: a decode step makes its own, inside its first kernel."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from dflash_sglang.patches.apply import replace


def resolve_seq_lens_cpu(original: Callable[..., None], future_map: Any, batch: Any, **kwargs: Any) -> None:
    """AROUND FutureMap.resolve_seq_lens_cpu: gathers a decode batch's lengths only for an attention backend that
    wants them on the host.

    Until the blocks are built, `batch.seq_lens` is of an earlier step.
    """
    if future_map.needs_cpu_seq_lens or not batch.forward_mode.is_decode():
        original(future_map, batch, **kwargs)
        return
    if future_map.publish_ready is not None:
        future_map.publish_ready.wait()  # as SGLang's own does: the scheduler's stream is behind the last step
    batch.seq_lens_cpu = batch.seq_lens_sum = None


def resolve_forward_inputs(original: Callable[..., None], batch: Any, future_map: Any) -> None:
    """AROUND resolve_forward_inputs: leaves a decode batch without its last tokens."""
    if not batch.forward_mode.is_decode():
        original(batch, future_map)


def keep_what_was_read() -> None:
    """SGLANG_IS_IN_CI has SGLang void what it has gathered from the relay; a decode step reads it once more."""
    replace("relay-asserts", pkgutil.resolve_name("sglang.srt.managers.overlap_utils"), False)
