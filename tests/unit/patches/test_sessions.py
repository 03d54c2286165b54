"""What a session keeps of a turn. `tests/engine/test_sessions.py` has turns of a server."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.patches import sessions


class Turn(SimpleNamespace):
    """What SGLang's Req keeps of a session's turn."""

    def __init__(self, **fields: Any):
        super().__init__(**fields, finished_reason=None, to_finish=None, output_ids=array("q"))
        self.output_ids_through_stop = self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None

    def inherit_mm_token_counts(self, last: Turn) -> None:
        pass

    def set_finish_with_abort(self, message: str) -> None:
        self.to_finish = message

    multimodal_inputs = None


def session_of(streaming: bool) -> Any:
    from sglang.srt.session.session_controller import Session

    return Session(100, "a", streaming=streaming)


def ask(session: Any, ids: list[int], **params: Any) -> Turn:
    from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
    from sglang.srt.session.session_controller import Session

    fields = dict.fromkeys(TokenizedGenerateReqInput.__struct_fields__)
    named = dict(rid=str(ids), input_ids=array("q", ids), session_params=SessionParams(id="a", **params))
    request = SimpleNamespace(**{**fields, **named})
    return sessions.create_req(Session.create_req, session, request, None, 320, req_factory=Turn)


@pytest.mark.parametrize("params", [{}, dict(replace=True), dict(offset=1), dict(drop_previous_output=True)])
def test_a_refused_turn_of_a_streaming_session_has_no_part_in_it(params):
    session = session_of(streaming=True)
    running, refused = ask(session, [1, 2]), ask(session, [3], **params)
    assert running.session is session and running.to_finish is None
    assert refused.session is None and refused.to_finish is not None
    assert session._inflight


def test_a_turn_that_replaces_all_others_ends_those_that_run():
    session = session_of(streaming=False)
    first, second = ask(session, [1, 2]), ask(session, [3])
    first.finished_reason = "length"
    turn = ask(session, [4, 5], replace=True)
    assert list(turn.origin_input_ids) == [4, 5] and turn.to_finish is None
    assert first.to_finish is None and second.to_finish is not None
    assert [node.req for node in session.req_nodes.values()] == [turn]


def test_a_turn_follows_what_was_said_of_the_one_before():
    session = session_of(streaming=False)
    first = ask(session, [1, 2])
    first.finished_reason, first.sampling_params = "stop", SimpleNamespace(max_new_tokens=9)
    first.output_ids, first.output_ids_through_stop = (
        array("q", [7, 8, 9]),
        array("q", [7, 8]),
    )  # with an accepted run
    assert list(ask(session, [3], rid=first.rid).origin_input_ids) == [1, 2, 7, 8, 3]


def never(*_: Any) -> None:
    raise AssertionError("expected no call of SGLang's")


def test_a_retracted_turn_gives_its_slots_back_and_is_still_the_one_that_runs():
    session = session_of(streaming=True)
    turn = ask(session, [1, 2])
    slot = SimpleNamespace(lock="lock")
    kept = SimpleNamespace(slots={"a": slot}, borrowed_slot=lambda _: slot)
    turn.kv, turn.lock = SimpleNamespace(holds_mamba=False), None
    assert sessions.try_cache_finished_req(never, kept, turn) is False
    assert (kept.slots, turn.lock, slot.lock) == ({}, "lock", None)
    assert session._inflight and session.req_nodes == {}
