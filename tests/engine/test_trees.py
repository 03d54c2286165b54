"""Steps that verify trees: trees and accepted paths of the reference loop, seeds, samples, and what keeps chains.

Losslessness with shapes that change at random is shown in `test_lossless`, `test_sampled_serving` and
`test_request_fields`.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from dflash_sglang.pair import held_out_prompts, pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_sampled_serving import assert_sampled_from, distribution
from tests.engine.test_width_serving import ask, prompts, request
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import greedy as greedy_outputs
from tests.support.engines import serve
from training.evaluate import load_pair
from training.shapes import PairRequest, Shape, Step, decode, greedy

pytestmark = pytest.mark.slow

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
NEW_TOKENS = 100
NEAR = 1e-4  # difference of log-probabilities that rounding of float32 may turn round


@contextmanager
def trees(directory: Path, nodes: list[int], hooks: str, graphs: bool = False, **flags: Any) -> Iterator[Server]:
    """Our server with trees of so many nodes in every step that can have one."""
    hooked = recorded_graphs.recording if graphs else scheduler_hooks.hooked
    config = {CONFIG_ENV: json.dumps({"copy": "off", "width": {"widths": [1, 16], "trees": nodes}})}
    environment = hooked(directory, f"always trees,{hooks}", **config)
    with serve(TARGET, DRAFT, environment=environment, **flags) as server:
        yield server


def grown(directory: Path) -> dict[str, list[tuple[list[int], list[int], list[int]]]]:
    """{rid: tokens, parents and accepted path of each step}; those of start-up have no rid."""
    found = defaultdict(list)
    for rid, tokens, parents, nodes in scheduler_hooks.noted(directory, "grown.jsonl"):
        path = [0, *(node for node in nodes[1:] if node)]
        if rid:
            found[rid].append((tokens, parents, path))
    return found


def routes(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Of each node the tokens from the root to it."""
    found: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        found.append((*(found[parent] if node else ()), token))
    return found


def assert_same_tree(tokens: list[int], parents: list[int], path: list[int], step: Step) -> None:
    """The reference's nodes, the likeliest first, and its accepted path. Where two are almost as likely either may
    come first, or be the last one that the tree has room for."""
    got, expected = routes(tokens, parents), routes(step.tokens, step.tree.parents)
    masses = dict(zip(expected, step.tree.masses, strict=True))
    least = min(masses.values())
    assert len(set(got)) == len(expected)
    strays = [masses[route] for route in set(expected) - set(got)]
    assert all(mass < least + NEAR for mass in strays), (strays, least)
    known = [masses.get(route, least) for route in got]
    assert all(later < earlier + NEAR for earlier, later in pairwise(known)), known
    assert [got[node] for node in path] == [expected[node] for node in step.path]


@pytest.mark.parametrize(
    ("nodes", "graphs"), [(16, True), pytest.param(32, False, marks=pytest.mark.release), (64, True)]
)
def test_trees_and_accepted_paths_are_the_reference_loops(tmp_path, nodes, graphs):
    texts = prompts()[:4]
    with trees(tmp_path, [nodes], "grown", graphs, page_size=16 if nodes == 32 else 1) as server:
        asked = [dict(request(text, NEW_TOKENS), rid=str(number)) for number, text in enumerate(texts)]
        answers = [server.generate(**one) for one in asked]
    steps = grown(tmp_path)
    target, draft, *_ = load_pair()
    for number, (text, answer) in enumerate(zip(texts, answers, strict=True)):
        [expected] = decode([PairRequest(target, draft, text)], Shape(nodes, candidates=8), NEW_TOKENS, [greedy])
        assert answer["output_ids"] == expected.ids[:NEW_TOKENS]
        got = steps[str(number)][: len(expected.steps)]  # overlap scheduling runs one more
        assert len(got) == len(expected.steps)
        for (*tree, path), step in zip(got, expected.steps, strict=True):
            assert_same_tree(*tree, path, step)
        assert any(path != list(range(len(path))) for *_, path in got), "no path left the first nodes"


def test_samples_follow_the_plain_servers_distribution_and_greedy_requests_beside_them_plain_decoding(tmp_path):
    prompt = list(held_out_prompts()[0].encode()[:60])
    with serve(TARGET) as server:
        expected = distribution(server, prompt)
        [plain] = ask(server, [request(prompt, NEW_TOKENS)])
    with trees(tmp_path, [8, 16], "grown", graphs=True, max_running_requests=16) as server:
        assert_sampled_from(server, prompt, expected)
        mixed = dict(temperature=1.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        answers = ask(server, [request(prompt, NEW_TOKENS), dict(input_ids=prompt, sampling_params=mixed)])
        assert answers[0]["output_ids"] == plain["output_ids"]
    assert sum(map(len, grown(tmp_path).values())) > 1000


def test_a_batch_that_needs_the_rows_of_blocks_keeps_chains(tmp_path):
    text = prompts()[0]
    with trees(tmp_path, [16], "grown") as server:
        adjusted = dict(request(text, 20), rid="bias")
        adjusted["sampling_params"]["logit_bias"] = {"7": -100}
        reported = dict(request(text, 20), rid="logprobs", return_logprob=True)
        for asked in (adjusted, reported, dict(request(text, 20), rid="tree")):
            server.generate(**asked)
    assert set(grown(tmp_path)) == {"tree"}


def test_near_the_end_of_the_context_trees_give_way_to_chains(tmp_path):
    text = prompts()[0]
    with serve(TARGET, context_length=200, disable_radix_cache=True) as server:
        plain = server.generate(**request(text, 170))
    with trees(tmp_path, [64], "grown,sentinels", context_length=200) as server:
        answer = server.generate(**request(text, 170))
        (state,) = server.get("/server_info")["internal_states"]
    assert answer["output_ids"] == plain["output_ids"]
    assert len(grown(tmp_path)) == 1
    assert state["dflash_acceptance"]["shapes"]["whole"]["context_end"] > 0


def test_a_pool_that_has_no_slots_for_a_tree_serves_chains(tmp_path):
    """At their end two requests need 2 * (170 + 16 + 16) slots, and with trees of 64 nodes 2 * (170 + 16 + 64)."""
    texts = [text[:20] for text in prompts()[:2]]
    flags = dict(max_total_tokens=420, max_running_requests=2, chunked_prefill_size=64)
    with serve(TARGET, disable_radix_cache=True, **flags) as server:
        plain = greedy_outputs(server, texts, 150)
    with trees(tmp_path, [64], "grown,sentinels", **flags) as server:
        outputs = greedy_outputs(server, texts, 150)
        (state,) = server.get("/server_info")["internal_states"]
    assert outputs == plain
    assert grown(tmp_path) and state["dflash_acceptance"]["shapes"]["whole"]["pool_full"] > 0


@pytest.mark.full
def test_trees_leave_the_slots_that_a_prompt_in_progress_counts_on(tmp_path):
    """Parts of prompts of 300 tokens run with decode steps of up to three other requests, in a pool of 640."""
    draws, text = random.Random(0), "\n".join(held_out_prompts()).encode()
    asked = []
    for _ in range(60):
        length, start = draws.choice([5, 20, 60, 300, 380]), draws.randrange(len(text) - 500)
        asked.append(request(list(text[start : start + length]), draws.choice([3, 20, 60, 110])))
    flags = dict(max_total_tokens=640, context_length=512, max_running_requests=4, chunked_prefill_size=64)
    flags |= dict(enable_mixed_chunk=True, disable_radix_cache=True)

    def outputs(server: Server) -> list[list[int]]:
        with ThreadPoolExecutor(4) as pool:
            return [answer["output_ids"] for answer in pool.map(lambda one: server.generate(**one), asked)]

    with serve(TARGET, **flags) as server:
        plain = outputs(server)
    with trees(tmp_path, [16, 32, 64], "grown", **flags) as server:
        assert outputs(server) == plain
    assert grown(tmp_path)
