"""C16 on the engine: both kinds of proposals give the target's filtered distribution, and greedy requests beside
sampled ones their greedy output."""

from __future__ import annotations

import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from tests.engines import greedy, serve
from tests.test_sampling import chi_square_bound
from tests.tiny import make_pair

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 60))
TOP_K, TEMPERATURE, DRAWS = 3, 1.6, 4000
SAMPLING = dict(temperature=TEMPERATURE, top_k=TOP_K, max_new_tokens=3, ignore_eos=True)
GREEDY_TOKENS = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(tiny) -> dict[str, Any]:
    """Greedy output after the prompt, and the distribution of three sampled tokens from the server's logprobs."""
    with serve(tiny[0]) as server:
        expected = {
            (a, b, c): p_a * p_b * p_c
            for a, p_a in next_token(server, PROMPT).items()
            for b, p_b in next_token(server, [*PROMPT, a]).items()
            for c, p_c in next_token(server, [*PROMPT, a, b]).items()
        }
        return dict(greedy=greedy(server, [PROMPT], GREEDY_TOKENS)[0], expected=expected)


def next_token(server: Server, prompt: list[int]) -> dict[int, float]:
    """{token: probability} of the sampled next token, from greedy logprobs."""
    answer = server.generate(
        input_ids=prompt,
        sampling_params=dict(temperature=0, max_new_tokens=1),
        return_logprob=True,
        top_logprobs_num=TOP_K,
    )
    (top,) = answer["meta_info"]["output_top_logprobs"]
    weights = {token: math.exp(logprob / TEMPERATURE) for logprob, token, _ in top}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@pytest.mark.parametrize("proposals", ["argmax", "drawn"])
def test_sampled_tokens_follow_the_plain_servers_distribution(tiny, plain, proposals):
    environment = {
        "DFLASH_SGLANG_REQUIRE": "1",
        "DFLASH_SGLANG_CONFIG": json.dumps({"proposals": proposals}),
    }
    with serve(*tiny, environment=environment, max_running_requests=48) as server, ThreadPoolExecutor(3) as pool:
        beside = pool.submit(greedy, server, [PROMPT] * 3, GREEDY_TOKENS)
        answers = pool.map(
            lambda _: server.generate(input_ids=PROMPT, sampling_params=dict(SAMPLING, n=100)), range(DRAWS // 100)
        )
        observed = Counter(tuple(one["output_ids"]) for answer in answers for one in answer)
        assert beside.result() == [plain["greedy"]] * 3
    expected = plain["expected"]
    assert set(observed) <= set(expected)
    chi_square = sum((observed[key] - DRAWS * p) ** 2 / (DRAWS * p) for key, p in expected.items())
    assert chi_square <= chi_square_bound(len(expected) - 1)
