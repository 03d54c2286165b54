"""A decode server that retracts a request keeps its KV on the host: the draft's context KV beside the target's.

Recurrent states are kept with it. They have no slots, so they must be those of the tokens that the host knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_sglang.patches.apply import replace
from dflash_sglang.sglang_names.scheduler import DisaggregationMode


def keep(allocator: Any, draft_pool: Any) -> None:
    """allocator: of the target's slots, which are the draft's as well."""
    copied, loaded = allocator.get_cpu_copy, allocator.load_cpu_copy

    def get_cpu_copy(slots: Any, **more: Any) -> tuple[Any, Any]:
        return copied(slots, **more), draft_pool.get_cpu_copy(slots)

    def load_cpu_copy(copies: tuple[Any, Any], slots: Any, **more: Any) -> None:
        of_target, of_draft = copies
        loaded(of_target, slots, **more)
        draft_pool.load_cpu_copy(of_draft, slots)

    replace("retracted-rows", allocator, get_cpu_copy)
    replace("resumed-rows", allocator, load_cpu_copy)


def update_running_batch(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """AROUND Scheduler.update_running_batch: under overlap scheduling a step may run while requests are retracted.

    SGLang drops what it commits of these requests, though it has moved their recurrent states on. Here a decode
    server takes the step's result first.
    """
    if scheduler.disaggregation_mode != DisaggregationMode.DECODE:
        return original(scheduler, batch)
    retract = batch.retract_decode

    def retract_decode() -> Any:
        if scheduler.result_queue:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
            scheduler.last_batch = None  # the event loop has no result of it to take
            batch.filter_batch()  # requests that have ended
        return retract() if batch.reqs else ([], scheduler.new_token_ratio_tracker.current, [])

    batch.retract_decode = retract_decode
    try:
        return original(scheduler, batch)
    finally:
        del batch.retract_decode
