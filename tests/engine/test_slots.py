"""Slots and rows: no write outside of a request's own (C4), requests at the context limit (C5).

The engines run with sentinels: each step may change only the slots of its own requests, each reservation only
their rows of req_to_token. SGLang itself ends the server when the pools are not full again once it is idle.
"""

from __future__ import annotations

import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from tests.support import scheduler_hooks
from tests.support.engines import greedy_params, serve
from tests.support.tiny import make_pair

pytestmark = [pytest.mark.slow, pytest.mark.full]

CONTEXT = 100


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


def ask(server: Server, prompt_length: int, new_tokens: int, seed: int = 0) -> dict[str, Any]:
    prompt = [4 + (7 * i + seed) % 300 for i in range(prompt_length)]
    return server.generate(input_ids=prompt, sampling_params=greedy_params(new_tokens))


def outline(answer: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    return answer["output_ids"], answer["meta_info"]["finish_reason"]


# (prompt, new tokens): totals of 96, 97, 99 and 100 of 100, and more than fit.
AT_THE_LIMIT = [(80, 16), (60, 37), (98, 1), (50, 49), (50, 50), (90, 10), (10, 90), (99, 5), (40, 500)]


@pytest.fixture(scope="module")
def plain(tiny) -> list[Any]:
    with serve(tiny[0], context_length=CONTEXT, max_total_tokens=1600, allow_auto_truncate=True) as server:
        return [outline(ask(server, *lengths, seed=i)) for i, lengths in enumerate(AT_THE_LIMIT)]


def test_requests_at_the_context_limit_touch_only_their_own_slots(tiny, plain, tmp_path):
    environment = scheduler_hooks.hooked(tmp_path, "sentinels")
    with serve(
        *tiny,
        environment=environment,
        context_length=CONTEXT,
        max_total_tokens=1600,
        page_size=16,
        allow_auto_truncate=True,
    ) as server:
        for i, lengths in enumerate(AT_THE_LIMIT):
            assert outline(ask(server, *lengths, seed=i)) == plain[i], lengths
        with ThreadPoolExecutor(len(AT_THE_LIMIT)) as pool:
            together = pool.map(lambda item: ask(server, *item[1], seed=item[0]), enumerate(AT_THE_LIMIT))
            assert [outline(answer) for answer in together] == plain
        time.sleep(2)  # idle: SGLang's own check of the pools runs, and would end the server
        server.post("/flush_cache?timeout=60")
        assert outline(ask(server, *AT_THE_LIMIT[0])) == plain[0]


def test_a_prompt_that_cannot_fit_is_refused_and_releases_its_slots(tiny):
    with serve(
        *tiny, environment={"DFLASH_SGLANG_REQUIRE": "1"}, context_length=CONTEXT, max_total_tokens=400
    ) as server:
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(server, 150, 5)
        assert refused.value.code == 400
        assert "context" in refused.value.read().decode()
        answers = [len(ask(server, 60, 30, seed=i)["output_ids"]) for i in range(12)]
        assert answers == [30] * 12, "twelve requests of 90 tokens through a pool of 400"
