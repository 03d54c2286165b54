"""Steps that verify trees or copied text do what the reference loop does, sample from the plain server's
distribution, and commit the texts that the target is said to write. Losslessness: `test_oracle`."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from bench.copies import Texts
from dflash_sglang.demo.server import Server
from dflash_sglang.kernels.block import find_copy
from dflash_sglang.settings.plugin_config import CONFIG_ENV, FORCED_ENV
from tests.engine.test_oracle import repeating
from tests.engine.test_sampled_serving import assert_sampled_from, of_the_trained_target
from tests.engine.test_width_serving import DRAFT, TARGET, ask, prompts, request
from tests.kernels.test_find_copy import plain_copy, plain_match
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import ask_at_once, greedy_params, kept, serve
from tests.support.engines import greedy as greedy_outputs
from training.evaluate import load_pair
from training.pair import held_out_prompts
from training.reference import ReferenceDraft, generate
from training.shapes import PairRequest, Shape, Step, decode, greedy

pytestmark = [pytest.mark.slow, pytest.mark.full]

NEW_TOKENS = 100
NEAR = 1e-4  # difference of log-probabilities that rounding of float32 may turn round


@contextmanager
def ours(
    directory: Path,
    settings: dict[str, Any],
    hooks: str,
    graphs: bool = False,
    variables: dict[str, str] | None = None,
    **flags: Any,
) -> Any:
    hooked = recorded_graphs.recording if graphs else scheduler_hooks.hooked
    environment = hooked(directory, hooks, **{CONFIG_ENV: json.dumps(settings), **(variables or {})})
    with serve(TARGET, DRAFT, environment=environment, **flags) as server:
        yield server


@contextmanager
def trees(directory: Path, nodes: list[int], hooks: str, **arguments: Any) -> Iterator[Server]:
    """Our server with trees of so many nodes in every step that can have one."""
    settings = {"copy": "off", "width": {"widths": [1, 16], "trees": nodes}}
    with ours(directory, settings, f"always trees,{hooks}", **arguments) as server:
        yield server


def state(server: Server) -> dict[str, Any]:
    (found,) = server.get("/server_info")["internal_states"]
    return found


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


@pytest.mark.parametrize(("settings", "nodes"), [({"width": "tree 16"}, 16), ({}, 64)], ids=["fixed 16", "64"])
def test_trees_and_accepted_paths_are_the_reference_loops(tmp_path, settings, nodes):
    """A batch that needs the rows of blocks has chains, and a request no nodes deeper than it allows."""
    texts, text = prompts()[:4], prompts()[0]
    apart = [dict(request(text, 20), rid="bias"), dict(request(text, 20), rid="logprobs", return_logprob=True)]
    apart[0]["sampling_params"]["logit_bias"] = {"7": -100}
    apart.append(dict(request(text, 20, 4), rid="width"))
    with (
        trees(tmp_path, [nodes], "grown")
        if not settings
        else ours(tmp_path, {"copy": "off", **settings}, "grown", graphs=True, page_size=16) as server
    ):
        asked = [dict(request(text, NEW_TOKENS), rid=str(number)) for number, text in enumerate(texts)]
        together = min(128 // nodes, 3)  # in graphs, one of them padding
        answers = [server.generate(**one) for one in asked[:-together]] + ask(server, asked[-together:])
        for one in apart:
            server.generate(**one)
        ask(server, [dict(request(texts[1], NEW_TOKENS, width), rid=f"most {width}") for width in (3, 16)])
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
    assert steps.keys() == {*map(str, range(len(texts))), "most 3", "most 16"}
    deepest = {rid: max(map(len, routes(*tree))) for rid in steps for *tree, _ in steps[rid] if rid == "most 3"}
    assert deepest == {"most 3": 3}


def test_samples_from_trees_follow_the_plain_servers_distribution_and_greedy_requests_plain_decoding(tmp_path):
    prompt, expected = of_the_trained_target()
    with kept(TARGET) as server:
        plain = greedy_outputs(server, [prompt], NEW_TOKENS)
    with trees(tmp_path, [8, 16], "grown", graphs=True, max_running_requests=16) as server:
        assert_sampled_from(server, prompt, expected)
        drawn = dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS, temperature=1.0))
        answers = ask(server, [request(prompt, NEW_TOKENS), drawn])
        assert [answers[0]["output_ids"]] == plain
    assert sum(map(len, grown(tmp_path).values())) > 1000


def test_a_pool_that_has_no_slots_for_a_tree_serves_chains(tmp_path):
    """At its end a request needs 170 + 16 + 16 slots; with trees of 64 nodes 44 tokens before it as many."""
    texts = [text[:20] for text in prompts()[:2]]
    flags = dict(max_total_tokens=206, max_running_requests=2, chunked_prefill_size=64)
    with kept(TARGET) as server:
        plain = greedy_outputs(server, texts, 150)
    with trees(tmp_path, [64], "grown,sentinels", **flags) as server:
        assert [greedy_outputs(server, [text], 150)[0] for text in texts] == plain
        assert state(server)["dflash_acceptance"]["shapes"]["whole"]["pool_full"] > 0
    assert grown(tmp_path)


def test_trees_leave_the_slots_that_a_prompt_in_progress_counts_on(tmp_path):
    """Parts of prompts of 300 tokens run with decode steps of up to three other requests, in a pool of 640. Where
    it has no slots for trees, steps have chains."""
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
    with trees(tmp_path, [16, 32, 64], "grown,sentinels", **flags) as server:
        assert outputs(server) == plain
    assert grown(tmp_path)


def test_samples_follow_the_plain_servers_distribution_where_copies_are_confidently_wrong(tmp_path):
    """Every match is copied, if only of the last byte: most copies are wrong, and said to be certain."""
    prompt, expected = of_the_trained_target()
    settings = {"copy": "block", "proposals": "drawn"}
    with ours(tmp_path, settings, "always copies", max_running_requests=48) as server:
        assert_sampled_from(server, prompt, expected)
        counts = state(server)["dflash_copy"]
        assert counts["request_steps"] > 4000 and counts["accepted"] < 0.5 * counts["proposed"], counts


def test_steps_of_every_shape_commit_the_texts_that_the_target_is_said_to_write(tmp_path):
    """With those of `bench.copies`; what is copied, and how much of it beyond blocks, is counted. The gates of
    copies are the server's own."""
    texts = Texts(("rewrite",), 300, NEW_TOKENS + 130, range(40, 250))
    texts.write(tmp_path / "texts.npz", "alike")
    forced = {FORCED_ENV: json.dumps({"texts": str(tmp_path / "texts.npz")})}
    reported = dict(enable_metrics=True, decode_log_interval=1)
    with ours(tmp_path, {"copy": 64, "width": {}}, "widths,shares", True, forced, **reported) as server:
        asked = texts.prompts["rewrite"][:12]
        together = [dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS)) for prompt in asked]
        alone = [dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS + 50)) for prompt in asked]
        answers = [*ask_at_once(server, together), *(server.generate(**one) for one in alone)]
        for prompt, answer in zip(2 * asked, answers, strict=True):
            text, output = texts.tokens[prompt[0]][len(prompt) :], answer["output_ids"]
            assert output[1:] == text[1 : len(output)]  # the first is the target's own
        found, metrics = state(server), server.text("/metrics")
        counts, acceptance = found["dflash_copy"], found["dflash_acceptance"]
        assert counts["proposed"] > counts["accepted"] > 200 and counts["beyond_block"] > 300, counts
        assert acceptance["shapes"]["copy"]["chosen"] > 10, acceptance["shapes"]
        assert acceptance["accepted"][31] > 3, acceptance["accepted"]
        assert found["dflash_width"]["shapes"]["copy 64"] >= acceptance["shapes"]["copy"]["chosen"]
        series = dict(proposed="copied_proposals", accepted="accepted_copies")
        for count, name in series.items():
            told = re.search(rf"dflash_{name}_total{{[^}}]*}} (\S+)", metrics)
            assert told and counts[count] >= float(told[1]) > 0.9 * counts[count], name
        assert all(part in metrics for part in ('form="copy"', 'form="ragged"', 'position="63"'))
        assert "copy: 64" in server.log_text()
        assert "copies beyond blocks: 64 rows up to 2 requests, 32 rows up to 4 requests" in server.log_text()


class CopyingReference(ReferenceDraft):
    """The reference draft, and copies of `text`, which is a prompt with its greedy output."""

    text: list[int]

    def begin(self, text: list[int]) -> None:
        self.text, self._last = text, (0, 0, list[int]())
        self._copies = [0.0, 0.0]
        self.copied = 0

    def block(self, block_embeds: Tensor, positions: Tensor, *context: Any) -> Tensor:
        self._prefix = int(positions[0])
        return super().block(block_embeds, positions, *context)

    def propose(self, hidden: Tensor, head: nn.Module, anchor: int) -> list[int]:
        own, prefix = super().propose(hidden, head, anchor), self._prefix
        text = self.text[: prefix + 1]
        assert text[-1] == anchor
        self._learn(prefix)
        length, after = plain_match(text)
        length = length if length >= find_copy.LEAST else 0
        copy = plain_copy(text, after, len(own)) if length else []
        level = (self._copies[0] + find_copy.FIRST_FAILED) / (self._copies[1] + find_copy.FIRST_EXPECTED)
        right = 1 - min(1.0, level * self._chance(length)) if length else 0.0
        promised = sum(right**n for n in range(len(own) + 1))
        said = head(hidden[1:]).log_softmax(-1).amax(-1).cumsum(0).exp().sum().item()
        used = bool(copy) and promised >= find_copy.GAIN * (1 + said)
        self._last = (prefix, length, copy)
        self.copied += used
        return copy + own[len(copy) :] if used else own

    def _learn(self, prefix: int) -> None:
        last, length, copy = self._last
        if not last:
            return
        truth = self.text[last + 1 : prefix + 1]
        told = copy[: len(truth)]
        right = next((n for n, (a, b) in enumerate(zip(told, truth, strict=False)) if a != b), len(told))
        failed = right < len(told)
        if told:
            self._copies[0] = self._copies[0] * find_copy.FADE + failed
            self._copies[1] = self._copies[1] * find_copy.FADE + self._chance(length) * (right + failed)

    @staticmethod
    def _chance(length: int) -> float:
        bounds = [(1, 0.55), (2, 0.38), (3, 0.25), (4, 0.16), (6, 0.11), (8, 0.08), (12, 0.055), (16, 0.04)]
        return [chance for least, chance in [*bounds, (32, 0.015)] if least <= length][-1]


def test_steps_commit_what_the_reference_loop_commits_with_the_same_copies(tmp_path):
    target, draft, *_ = load_pair()
    texts = repeating()[:4]
    with ours(tmp_path, {"copy": "block"}, "") as server:
        answers = [server.generate(input_ids=text, sampling_params=greedy_params(NEW_TOKENS)) for text in texts]
        counts = state(server)["dflash_copy"]
        assert "copy: block" in server.log_text()
        forbidding = {"custom_params": {"dflash": {"copy": False}}}
        for text, answer in zip(texts, answers, strict=True):
            same = server.generate(input_ids=text, sampling_params=greedy_params(NEW_TOKENS) | forbidding)
            assert same["output_ids"] == answer["output_ids"]
        assert state(server)["dflash_copy"] == counts
    reference, copied, fewer = CopyingReference(draft.model), 0, 0
    for text, answer in zip(texts, answers, strict=True):
        # A block that ends beyond the output is not judged by what follows there.
        without = generate(target, draft, text, NEW_TOKENS + 20, ignore_eos=True)
        reference.begin(text + without.ids)
        expected = generate(target, reference, text, NEW_TOKENS, ignore_eos=True)
        assert answer["output_ids"] == expected.ids
        assert answer["meta_info"]["spec_verify_ct"] == len(expected.accept_lengths)
        copied += reference.copied
        fewer += len(generate(target, draft, text, NEW_TOKENS, ignore_eos=True).accept_lengths)
        fewer -= len(expected.accept_lengths)
    assert copied > 5 and copied <= counts["request_steps"] <= copied + len(texts)  # overlap runs one more step
    assert fewer > 0, "copies saved no step"
