"""Turns of a streaming session equal the same prompts sent whole to an empty prefix cache, float32 on the CPU.

Between turns SGLang keeps the slots of what it takes for written: rows that no step wrote are NaN (`poison`).
Recurrent states go through the prefix cache: an oracle has steps accept past the stop of a turn, and every step
has another width.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_recurrent_serving import random_ids
from tests.support import scheduler_hooks
from tests.support.engines import RETRACTING, greedy_params, serve
from tests.zoo.member import pair
from training.pair import pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

EVERY_WIDTH = {CONFIG_ENV: '{"width": {"widths": [1, 2, 3, 5, 8]}}'}  # another one in each step
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "synchronous_pages_of_16_retracting": dict(
        hooks="poison,oracle", disable_overlap_schedule=True, page_size=16, env=RETRACTING
    ),
    "copies_at_every_width": dict(
        hooks="poison,copies,widths", env={CONFIG_ENV: '{"copy": "block", "width": {}}'}
    ),
    "recurrent": dict(recurrent=True, hooks="oracle,widths", env=EVERY_WIDTH),
}
# (prompt tokens, new tokens, the output token that ends it or None) of each session's turns
SESSIONS = [
    [(20, 3, None), (9, 8, None), (1, 13, None)],
    [(41, 40, 21), (5, 40, 4), (30, 9, None)],
    [(70, 40, None), (12, 40, 17), (3, 40, None)],
    [(110, 30, 24), (2, 1, None), (15, 40, 31)],
]
TOLERANCE = 1e-3  # of a logprob

Answer = dict[str, Any]
Turn = tuple[dict[str, Any], Answer]  # what is asked in the session, what is answered
_names = count()


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def conversations(request, tmp_path_factory) -> Iterator[tuple[Server, list[list[Turn]]]]:
    """A server, and the turns of every session as they ought to be."""
    arguments = dict(CONFIGURATIONS[request.param])
    trained = pair_directories()
    target, draft = pair("Qwen3.5") if arguments.pop("recurrent", False) else (trained["target"], trained["draft"])
    records = tmp_path_factory.mktemp("records")
    environment = scheduler_hooks.hooked(records, arguments.pop("hooks"), **arguments.pop("env", {}))
    with serve(target, draft, environment=environment, enable_streaming_session=True, **arguments) as server:
        yield server, [list(turns_of(server, number, records)) for number in range(len(SESSIONS))]
        print(server.log_tail(40))  # shown with a failure


def turns_of(server: Server, number: int, records: Path) -> Iterator[Turn]:
    """A session's turns with what their whole prompts give without a session; the oracle proposes what follows."""
    history: list[int] = []
    for length, new_tokens, end in SESSIONS[number]:
        asked = random_ids(length, seed=1000 * number + len(history))
        sampling = dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
        server.post("/flush_cache?timeout=60")
        whole = server.generate(input_ids=history + asked, sampling_params=sampling, return_logprob=True)
        output = whole["output_ids"]
        scheduler_hooks.record(records, history + asked, output)
        if end is not None:
            sampling = dict(temperature=0, max_new_tokens=new_tokens, stop_token_ids=[output[end]])
            output = output[: output.index(output[end]) + 1]
        yield dict(input_ids=asked, sampling_params=sampling), whole | dict(output_ids=output)
        history += asked + output


def logprobs(answer: Answer) -> torch.Tensor:
    return torch.tensor([logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]])


def opened(server: Server, streaming: bool = True) -> str:
    """A new session's id."""
    name = f"session-{next(_names)}"
    server.post("/open_session", capacity_of_str_len=4096, streaming=streaming, session_id=name)
    return name


def converse(server: Server, turns: list[Turn]) -> int:
    """Asks a session's turns; returns how many tokens of their prompts were kept from turns before."""
    name, before, kept = opened(server), None, 0
    for asked, expected in turns:
        answer = server.generate(**asked, session_params=dict(id=name, rid=before), return_logprob=True)
        about = answer["meta_info"]
        assert about["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
        assert answer["output_ids"] == expected["output_ids"], about
        length = len(answer["output_ids"])
        torch.testing.assert_close(logprobs(answer), logprobs(expected)[:length], atol=TOLERANCE, rtol=0)
        before, kept = about["id"], kept + about["cached_tokens"]
    server.post("/close_session", session_id=name)
    return kept


def test_turns_equal_their_whole_prompts_one_session_after_the_other(conversations):
    server, sessions = conversations
    for turns in sessions:
        server.post("/flush_cache?timeout=60")
        assert converse(server, turns) > 0 or len(turns[0][0]["input_ids"]) < 64


def test_turns_equal_their_whole_prompts_in_sessions_at_once(conversations, request):
    server, sessions = conversations
    server.post("/flush_cache?timeout=60")
    with ThreadPoolExecutor(len(sessions)) as pool:
        assert sum(pool.map(lambda turns: converse(server, turns), sessions * 2)) > 0
    assert ("Testing retraction" in server.log_text()) == ("retracting" in request.node.name)


@contextmanager
def running(server: Server, asked: dict[str, Any], answers: list[Answer], **session: Any) -> Iterator[str]:
    """Its turn runs until the end of the block; its events are appended then. Yields the turn's id."""
    server.post("/slow_down", forward_sleep_time=0.2)
    try:
        events = server.stream(**asked, session_params=session)
        answers.append(next(events))
        yield answers[0]["meta_info"]["id"]
    finally:
        server.post("/slow_down", forward_sleep_time=None)
    answers += events


def refuse(server: Server, asked: dict[str, Any], **session: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.generate(**asked, session_params=session)
    assert refused.value.code == 400


def test_turns_beside_one_that_runs_are_refused_and_leave_it_and_the_next_exact(conversations):
    server, sessions = conversations
    (first, expected), (second, followed), (third, last) = sessions[2]
    name, answers = opened(server), []
    with running(server, first, answers, id=name):
        for more in ({}, dict(replace=True), dict(offset=3), {}):
            refuse(server, second, id=name, **more)
    assert answers[-1]["output_ids"] == expected["output_ids"]
    long, aborted = dict(second, sampling_params=greedy_params(300)), []
    with running(server, long, aborted, id=name) as rid:
        refuse(server, second, id=name)
        server.post("/abort_request", rid=rid)
    assert aborted[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.generate(**second, session_params=dict(id=name))["output_ids"] == followed["output_ids"]
    answers = []
    with running(server, third, answers, id=name):
        refuse(server, second, id=name)
        server.post("/close_session", session_id=name)
        refuse(server, second, id=name)
    assert answers[-1]["output_ids"] == last["output_ids"]
    server.post("/flush_cache?timeout=60")


def test_a_turn_that_replaces_all_others_of_a_session_is_exact(conversations):
    server, sessions = conversations
    (first, expected), (second, followed), _ = sessions[2]
    name, replaced = opened(server, streaming=False), []
    server.generate(**second, session_params=dict(id=name))
    with running(server, dict(second, sampling_params=greedy_params(300)), replaced, id=name):
        answer = server.generate(**first, session_params=dict(id=name, replace=True))
    assert replaced[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"] == expected["output_ids"]
    answer = server.generate(**second, session_params=dict(id=name, rid=answer["meta_info"]["id"]))
    assert answer["output_ids"] == followed["output_ids"]
    server.post("/close_session", session_id=name)
