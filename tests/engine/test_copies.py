"""Copies of a request's own text: output equals plain decoding, samples follow its distribution, and steps commit
what a plain account of matches and records foretells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from bench.copies import Texts
from dflash_sglang.demo.server import Server
from dflash_sglang.kernels.block import find_copy
from dflash_sglang.pair import held_out_prompts, pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_lossless as lossless
from tests.engine.test_sampled_serving import assert_sampled_from, of_the_trained_target
from tests.kernels.test_find_copy import plain_copy, plain_match
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import RETRACTING, ask_at_once, greedy_params, serve
from tests.support.rows import in_full_but
from training.evaluate import load_pair
from training.reference import ReferenceDraft, generate

pytestmark = pytest.mark.slow

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "always": dict(hooks="always copies"),
    "recorded_graphs_of_random_shapes": dict(
        graphs=True, hooks="widths,shares,trees,copies", settings={"width": {"trees": [8, 16, 32, 64]}}
    ),
    "synchronous_pages_of_16_chunked_retracting": dict(
        page_size=16,
        disable_overlap_schedule=True,
        chunked_prefill_size=64,
        hooks="copies",
        environment=RETRACTING,
    ),
}
NEW_TOKENS = 100


@contextmanager
def copying(
    directory: Path,
    pair: tuple[Path, Path] = (TARGET, DRAFT),
    hooks: str = "",
    graphs: bool = False,
    settings: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **flags: Any,
) -> Iterator[Server]:
    hooked = recorded_graphs.recording if graphs else scheduler_hooks.hooked
    config = {CONFIG_ENV: json.dumps({"copy": "block", **(settings or {})})}
    variables = hooked(directory, hooks, **config, **(environment or {}))
    with serve(*pair, environment=variables, **flags) as server:
        yield server


def told(server: Server) -> dict[str, Any]:
    (state,) = server.get("/server_info")["internal_states"]
    return state["dflash_copy"]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Every third request of `test_lossless`, texts that repeat themselves, and answers without speculation."""
    with serve(TARGET, skip_tokenizer_init=None, disable_overlap_schedule=True) as server:
        following = {
            len(prompt): server.generate(**lossless.request(prompt))["output_ids"]
            for prompt in lossless.prompts()
            if len(prompt) in (64, 300)
        }
        asked = lossless.requests(following)
        n = len(lossless.LENGTHS)
        asked = asked[:n] + asked[n::3] + [lossless.request(text) for text in repeating()]
        return dict(asked=asked, answers=ask_at_once(server, asked))


def repeating() -> list[list[int]]:
    """Prompts that end with the beginning of a text that they have already."""
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[start : start + 250] + b"\n\n" + text[start : start + 60]) for start in range(0, 6000, 900)]


@pytest.mark.parametrize("name", in_full_but(CONFIGURATIONS, "recorded_graphs_of_random_shapes"))
def test_outputs_equal_plain_decoding_whatever_is_copied(plain, tmp_path, name):
    with copying(tmp_path, **CONFIGURATIONS[name], skip_tokenizer_init=None) as server:
        lossless.assert_equal(ask_at_once(server, plain["asked"]), plain)
        warm = {key: value[::2] for key, value in plain.items()}
        lossless.assert_equal(ask_at_once(server, warm["asked"]), warm)
        counts = told(server)
        assert counts["request_steps"] > 200 and counts["proposed"] > counts["accepted"] > 100, counts
        if "retracting" in name:
            assert "Testing retraction" in server.log_text()
        if name.endswith("random_shapes"):
            lossless.assert_all_shapes_are_drawn(server, repeating())


@pytest.mark.full
def test_two_ranks_copy_alike(plain, tmp_path):
    greedy = [one for one in plain["asked"] if one["sampling_params"]["temperature"] == 0]
    flags = dict(tp_size=2, skip_tokenizer_init=None, mem_fraction_static=0.2, max_total_tokens=6000)
    with copying(tmp_path, hooks="copies", **flags) as server:
        lossless.assert_equal(ask_at_once(server, greedy), plain)
        for seed in range(3):
            sampling = dict(temperature=0.9, max_new_tokens=60, ignore_eos=True, n=2)
            server.generate(input_ids=repeating()[seed], sampling_params=sampling)
        assert told(server)["request_steps"] > 100
    first, second = ((tmp_path / f"copies.{rank}.jsonl").read_text() for rank in range(2))
    assert first.count("\n") > 100 and first == second


@pytest.mark.parametrize("proposals", ["drawn", pytest.param("argmax", marks=pytest.mark.release)])
def test_samples_follow_the_plain_servers_distribution_where_copies_are_confidently_wrong(tmp_path, proposals):
    """Every match is copied, if only of the last byte: most copies are wrong, and said to be certain."""
    prompt, expected = of_the_trained_target()
    settings = {"proposals": proposals}
    with copying(tmp_path, hooks="always copies", settings=settings, max_running_requests=48) as server:
        assert_sampled_from(server, prompt, expected)
        counts = told(server)
        assert counts["request_steps"] > 4000 and counts["accepted"] < 0.5 * counts["proposed"], counts


def test_steps_of_every_shape_commit_the_texts_that_the_target_is_said_to_write(tmp_path):
    """With those of `bench.copies`, and both series of copies."""
    texts = Texts(("rewrite",), 300, NEW_TOKENS + 20, range(40, 250))
    texts.write(tmp_path / "texts.npz", "alike")
    forced = {"DFLASH_SGLANG_FORCED": json.dumps({"texts": str(tmp_path / "texts.npz")})}
    reported = dict(enable_metrics=True, decode_log_interval=1)
    more = dict(settings={"width": {}}, environment=forced, **reported)
    with copying(tmp_path, hooks="widths,shares,copies", graphs=True, **more) as server:
        prompts = texts.prompts["rewrite"][:12]
        asked = [dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS)) for prompt in prompts]
        for prompt, answer in zip(prompts, ask_at_once(server, asked), strict=True):
            text = texts.tokens[prompt[0]][len(prompt) :]
            assert answer["output_ids"][1:] == text[1:NEW_TOKENS]  # the first is the target's own
        counts = told(server)
        assert counts["proposed"] > counts["accepted"] > 200, counts
        names = ("copied_proposals", "accepted_copies")
        found = [re.search(rf"dflash_{name}_total{{[^}}]*}} (\S+)", server.text("/metrics")) for name in names]
        proposed, accepted = (float(one[1]) for one in found if one)
        assert counts["proposed"] >= proposed > 0.9 * counts["proposed"]
        assert counts["accepted"] >= accepted > 0.9 * counts["accepted"]
        assert 'form="ragged"' in server.text("/metrics")


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
    with copying(tmp_path) as server:
        answers = [server.generate(input_ids=text, sampling_params=greedy_params(NEW_TOKENS)) for text in texts]
        counts = told(server)
        assert "copy: block" in server.log_text()
        forbidding = {"custom_params": {"dflash": {"copy": False}}}
        for text, answer in zip(texts, answers, strict=True):
            same = server.generate(input_ids=text, sampling_params=greedy_params(NEW_TOKENS) | forbidding)
            assert same["output_ids"] == answer["output_ids"]
        assert told(server) == counts
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
