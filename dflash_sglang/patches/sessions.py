"""A session's next turn goes on from where the one before ended: its tokens, and what is written of their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_sglang.sglang_names.scheduler import FINISH_ABORT


def concat_token_arrays(original: Callable[..., Any], last_req: Any, *args: Any) -> Any:
    """AROUND Session._concat_token_arrays: the prompt of a session's next turn, which ends the one before where
    that stopped."""
    last_req.output_ids = last_req.output_ids_through_stop
    return original(last_req, *args)


def try_cache_finished_req(original: Callable[..., bool], sessions: Any, req: Any) -> bool:
    """AROUND StreamingSession.try_cache_finished_req: what a streaming session keeps of a turn for the next one;
    False where the prefix cache gets it.

    SGLang takes every token that has a slot for written. Here blocks are reserved in advance, and the last token
    that a step commits has a slot before the step that writes its keys: a turn that ends with it leaves it to the
    next turn's prefill.

    A recurrent state has no slots, and cannot go back. Where a step accepts past a stop, or the next one was
    launched already, it is past the turn's end: the next turn starts from a state that the prefix cache keeps.
    """
    slot = sessions.borrowed_slot(req)
    if slot is not None and req.kv.holds_mamba and not isinstance(req.finished_reason, FINISH_ABORT):
        del sessions.slots[req.session.session_id]
        req.lock, slot.lock = slot.lock, None
        if req.finished():
            req.output_ids = req.output_ids_through_stop
            req.session.finish_req(req)
        return False
    written = req.kv.kv_committed_len
    kept = original(sessions, req)
    if kept:
        slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, written)
    return kept
