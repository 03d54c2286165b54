"""C16 on the engine: both kinds of proposals give the target's filtered distribution, in blocks of one width and
of another in each step, and greedy requests beside sampled ones their greedy output."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import greedy, kept, serve
from tests.support.tiny import make_pair
from tests.unit.verify.test_sampling import chi_square_bound
from training.pair import held_out_prompts, pair_directories

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 60))
TOP_K, TEMPERATURE, DRAWS = 3, 1.6, 4000
GREEDY_TOKENS = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def plain(tiny) -> dict[str, Any]:
    """Greedy output after the prompt, and the distribution of three sampled tokens from the server's logprobs."""
    with serve(tiny[0]) as server:
        return dict(greedy=greedy(server, [PROMPT], GREEDY_TOKENS)[0], expected=distribution(server, PROMPT))


@functools.cache
def of_the_trained_target() -> tuple[list[int], dict[tuple[int, ...], float]]:
    """A prompt that leaves three tokens in doubt, and the `distribution` of these."""
    prompt = list(held_out_prompts()[0].encode()[:60])
    with kept(Path(pair_directories()["target"])) as server:
        return prompt, distribution(server, prompt)


def distribution(server: Server, prompt: list[int], count: int = 3) -> dict[tuple[int, ...], float]:
    """{so many tokens: probability} of what is sampled after the prompt, from greedy logprobs."""
    if count == 0:
        return {(): 1.0}
    return {
        (token, *following): p * p_following
        for token, p in next_token(server, prompt).items()
        for following, p_following in distribution(server, [*prompt, token], count - 1).items()
    }


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


def assert_sampled_from(server: Server, prompt: list[int], expected: dict[tuple[int, ...], float]) -> None:
    """`DRAWS` outputs, three requests at a time, follow the distribution. A sample in a thousand fails by chance;
    then another one decides."""
    over = _over_chi_square(server, prompt, expected)
    assert over <= 0 or _over_chi_square(server, prompt, expected) <= 0, f"by {over:.1f}, and again"


def _over_chi_square(server: Server, prompt: list[int], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square of a sample over its 0.001 bound."""
    (count,) = {len(tokens) for tokens in expected}
    sampling = dict(temperature=TEMPERATURE, top_k=TOP_K, max_new_tokens=count, ignore_eos=True, n=100)
    asked = dict(input_ids=prompt, sampling_params=sampling)
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda _: server.generate(**asked), range(DRAWS // 100))
        observed = Counter(tuple(one["output_ids"]) for answer in answers for one in answer)
    assert set(observed) <= set(expected)
    chi_square = sum((observed[key] - DRAWS * p) ** 2 / (DRAWS * p) for key, p in expected.items())
    return chi_square - chi_square_bound(len(expected) - 1)


@pytest.mark.parametrize(
    ("proposals", "width"),
    [
        pytest.param("argmax", "block", id="argmax, blocks of one width"),
        pytest.param("drawn", {}, id="drawn, blocks of any width"),
    ],
)
@pytest.mark.full
def test_sampled_tokens_follow_the_plain_servers_distribution(tiny, plain, proposals, width, tmp_path):
    config = {CONFIG_ENV: json.dumps({"proposals": proposals, "width": width})}
    environment = scheduler_hooks.hooked(tmp_path, "" if width else "widths", **config)
    with serve(*tiny, environment=environment, max_running_requests=48) as server, ThreadPoolExecutor(1) as pool:
        beside = pool.submit(greedy, server, [PROMPT] * 3, GREEDY_TOKENS)
        assert_sampled_from(server, PROMPT, plain["expected"])
        assert beside.result() == [plain["greedy"]] * 3
        (state,) = server.get("/server_info")["internal_states"]
        assert sum(count > 0 for count in state["dflash_width"]["steps"].values()) == (1 if width else 5)


def test_ragged_steps_sample_from_the_plain_servers_distribution(tmp_path):
    """Of a trained pair, whose drawn proposals are often accepted. In graphs, which accept the likeliest tokens
    before others are drawn."""
    target, draft = (Path(pair_directories()[name]) for name in ("target", "draft"))
    prompt, expected = of_the_trained_target()
    config = {CONFIG_ENV: json.dumps({"proposals": "drawn", "width": "auto"})}
    environment = recorded_graphs.recording(tmp_path, "widths,shares", **config)
    with serve(target, draft, environment=environment, max_running_requests=16) as server:
        assert_sampled_from(server, prompt, expected)
        (state,) = server.get("/server_info")["internal_states"]
        told = state["dflash_acceptance"]
        assert told["shapes"]["ragged"]["chosen"] > 50 and set(told["shapes"]["whole"]) == {"chosen"}
        assert told["accepted"][0] > 1000
    replayed = {one.captured for one in recorded_graphs.replays(tmp_path) if one.role == "target"}
    assert replayed - set(recorded_graphs.SIZES), "no graph for a number of tokens was replayed"
