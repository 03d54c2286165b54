"""What clients of a prefill and a decode server see when something fails; after each fault both serve as before.

SGLang's time-outs are set to a few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_disaggregated import DRAFT, TARGET, asked
from tests.support.disaggregated import Apart, Refused, answer_of, decode_beside, prefill_beside, serve_apart
from tests.support.engines import greedy_params

pytestmark = [pytest.mark.slow, pytest.mark.full]

SECONDS = "8"
ENVIRONMENT = {
    "DFLASH_SGLANG_REQUIRE": "1",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": SECONDS,
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": SECONDS,
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "1",
}
ASKED = [dict(one, sampling_params=greedy_params(16)) for one in asked()]
SHORT = dict(input_ids=[65, 66, 67, 68, 69], sampling_params=greedy_params(8))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with serve_apart(TARGET, DRAFT, tmp_path_factory.mktemp("apart"), environment=ENVIRONMENT) as both:
        yield both


@pytest.fixture(scope="module")
def expected(apart: Apart) -> Any:
    return [answer["output_ids"] for answer in apart.ask_all(ASKED)]


def serves_on(apart: Apart, expected: Any) -> None:
    """And both servers find every slot free when they are idle."""
    for _ in range(4):
        assert [answer["output_ids"] for answer in apart.ask_all(ASKED)] == expected
    apart.assert_idle()


def test_a_request_that_one_server_never_gets_or_whose_transfer_fails_is_answered(apart, expected):
    """And one whose transfer is slow waits for it."""
    for server, state in ((apart.prefill, "KVPoll.Bootstrapping"), (apart.decode, "KVPoll.WaitingForInput")):
        refused = answer_of(server, **SHORT, **apart.room())
        assert isinstance(refused, Refused) and refused.status == 500
        assert "timed out after 8." in str(refused) and state in str(refused)
    with apart.fault("slow 2"):
        assert apart.ask(**ASKED[0])["output_ids"] == expected[0]
    with apart.fault("break"):
        for refused in apart.ask_both(**SHORT):
            assert isinstance(refused, Refused) and refused.status == 500
    wait_until_served(apart)
    serves_on(apart, expected)


def test_requests_outlive_their_prefill_server_once_they_decode_and_its_successor_serves(
    apart, expected, tmp_path
):
    with prefill_beside(apart, TARGET, DRAFT, environment=ENVIRONMENT) as first:
        assert first.ask(**ASKED[0])["output_ids"] == expected[0]
        port = first.bootstrap_port
        with first.fault("slow 60"):
            waiting = first.ask_later(**ASKED[1])
            first.prefill.stop()
            refused = waiting.result()
    assert isinstance(refused, Refused) and refused.status == 500
    assert "Lost connection with prefill instance" in str(refused)
    with prefill_beside(apart, TARGET, DRAFT, bootstrap_port=port, environment=ENVIRONMENT) as second:
        wait_until_served(second)
        assert second.ask(**ASKED[1])["output_ids"] == expected[1]
    serves_on(apart, expected)


def test_a_decode_server_that_dies_breaks_off_and_its_prefill_server_serves_its_successor(apart, expected):
    with decode_beside(apart, TARGET, DRAFT, environment=ENVIRONMENT) as dying:
        assert dying.ask(**ASKED[0])["output_ids"] == expected[0]
        with ThreadPoolExecutor(2) as pool:
            decoding = pool.submit(dying.ask_both, **{**SHORT, "sampling_params": greedy_params(3000)})
            while "Decode batch" not in dying.decode.log_text():  # every 40 steps
                time.sleep(0.1)
            with dying.fault("slow 3"):
                waiting = pool.submit(dying.ask_both, **ASKED[1])
                time.sleep(1)
                dying.decode.stop()
                (of_prefill, broken), (refused, never) = decoding.result(), waiting.result()
    assert len(of_prefill["output_ids"]) == 1  # before the decode server died
    assert broken.status == never.status == 0  # no answer
    assert refused.status == 500
    with decode_beside(apart, TARGET, DRAFT, environment=ENVIRONMENT) as successor:
        serves_on(successor, expected)
    serves_on(apart, expected)


def test_every_request_has_an_answer_where_many_fail_at_random(tmp_path: Path) -> None:
    """SGLang draws at every poll of a request."""
    environment = {**ENVIRONMENT, "SGLANG_TEST_DISAGG_FAILURE_PROB": "0.02"}
    with serve_apart(TARGET, DRAFT, tmp_path, environment=environment) as apart:
        answers = [answer for _ in range(20) for answer in apart.ask_all([SHORT] * 25, refused=True)]
        served = [answer["output_ids"] for answer in answers if not isinstance(answer, Refused)]
        assert len(answers) == 500 and 0 < len(served) < 500
        assert all(ids == served[0] for ids in served)
        apart.assert_idle()


def wait_until_served(apart: Apart) -> None:
    """SGLang tries a connection that failed again after a second or two; 60 are enough."""
    until = time.monotonic() + 60
    while isinstance(refused := apart.ask_both(**SHORT)[1], Refused):
        assert time.monotonic() < until, f"no request is served any more: {refused}"
        time.sleep(0.2)
