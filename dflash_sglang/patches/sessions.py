"""A session's next turn goes on from where the one before ended: its tokens, and what is written of their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_sglang.sglang_names.scheduler import FINISH_ABORT


def create_req(original: Callable[..., Any], session: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND Session.create_req: a session's next turn. Its prompt ends the turn before where that stopped.

    A turn that is refused here leaves the session: SGLang takes its end for that of the turn that runs, and admits
    a third one onto the same slots.
    """
    asked = request.session_params
    if not session.streaming and asked.replace and asked.rid is None:
        for node in session.req_nodes.values():
            node.abort()
        session.req_nodes.clear()  # SGLang does so while it walks through them, which ends the scheduler
    node = next(iter(session.req_nodes.values()), None) if session.streaming else session.req_nodes.get(asked.rid)
    if node is not None:
        node.req.output_ids = node.req.output_ids_through_stop
    turn = original(session, request, *args, **kwargs)
    if session.streaming and turn.to_finish is not None:
        turn.session = None
    return turn


def try_cache_finished_req(original: Callable[..., bool], sessions: Any, req: Any) -> bool:
    """AROUND StreamingSession.try_cache_finished_req: what a streaming session keeps of a turn for the next one;
    False where the prefix cache gets it.

    SGLang takes every token that has a slot for written. Here blocks are reserved in advance, and the last token
    that a step commits has a slot before the step that writes its keys: a turn that ends with it leaves it to the
    next turn's prefill.

    A turn that is retracted still runs. SGLang would admit another one meanwhile, onto the same slots: it gives
    them back, and prefills again.

    A recurrent state has no slots, and cannot go back. Where a step accepts past a stop, or the next one was
    launched already, it is past the turn's end: the next turn starts from a state that the prefix cache keeps.
    """
    slot = sessions.borrowed_slot(req)
    given_back = req.kv.holds_mamba or not req.finished()
    if slot is not None and given_back and not isinstance(req.finished_reason, FINISH_ABORT):
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
