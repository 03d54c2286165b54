"""A DSpark draft behind a real server in float32: lossless at every width, sampled output of the target's
distribution (C16), tensor parallel (C21).

The draft is the trained plain one with a Markov head of pairs of letters. Its rows were trained for the token of
their own place and propose the next one, so that the head decides, and is accepted now and then.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_sglang.demo.server import Server
from dflash_sglang.pair import held_out_prompts
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_parallel
from tests.engine.test_dflash2_serving import (
    NEW_TOKENS,
    PLAIN_DRAFT,
    TARGET,
    assert_distributed,
    draws,
    prompts,
    request,
    target,
    three_tokens,
)
from tests.support import scheduler_hooks, tiny
from tests.support.draft_formats import speculators_config
from tests.support.engines import serve
from tests.support.reference_dspark import added_tensors, dspark_config, dspark_tensors
from tests.support.tiny import write_checkpoint
from training.reference import plain_generate

__all__ = ["target"]
pytestmark = pytest.mark.slow
ROWS, RANK = 7, 32
works = pytest.mark.matrix(target="Qwen3", draft="DSpark", kv="model dtype", outcome="works")


@pytest.fixture(scope="module")
def expected(target: Any) -> list[list[int]]:
    return [plain_generate(target, prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts()]


def dspark_draft(directory: Path, kind: str = "vanilla") -> Path:
    """The trained plain draft with `pairs_of_letters`: under a gate that is nearly open, or through a state that
    keeps nothing."""
    config = json.loads((PLAIN_DRAFT / "config.json").read_text())
    config |= dict(architectures=["Qwen3DSparkModel"], block_size=ROWS, markov_rank=RANK)
    config |= dict(markov_head_type=kind)
    added = {**added_tensors(config), **pairs_of_letters(config["vocab_size"])}
    if kind == "gated":
        added["markov_head.gate_proj.weight"] *= 0.1
        added["markov_head.gate_proj.bias"] = torch.full((RANK,), 4.0)
    if kind == "rnn":
        joint = added["markov_head.joint_proj.weight"].zero_()
        joint[2 * RANK :, RANK : 2 * RANK].fill_diagonal_(0.02)
        added["markov_head.joint_proj.bias"].zero_()
        added["markov_head.markov_w2.weight"] *= 50
    tensors = load_file(PLAIN_DRAFT / "model.safetensors")
    tensors |= {name: tensor.bfloat16() for name, tensor in added.items()}
    return write_checkpoint(directory, config, tensors)


@pytest.fixture(scope="module", params=["vanilla", pytest.param("rnn", marks=pytest.mark.full)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]], kind: str) -> Iterator[Server]:
    """Blocks of any width; rejected rows are poisoned after every step."""
    draft = dspark_draft(tmp_path_factory.mktemp("dspark") / "draft", kind)
    records = tmp_path_factory.mktemp("records")
    for prompt, output in zip(prompts(), expected, strict=True):
        scheduler_hooks.record(records, prompt, output)
    environment = {
        "DFLASH_SGLANG_REQUIRE": "1",
        "PYTHONPATH": scheduler_hooks.install(tmp_path_factory.mktemp("hooks")),
        scheduler_hooks.HOOKS_ENV: "widths,oracle,poison",
        scheduler_hooks.RECORDS_ENV: str(records),
        CONFIG_ENV: '{"width": {}}',
    }
    with serve(TARGET, draft, environment=environment, max_running_requests=48, page_size=16) as server:
        yield server
        print(server.log_tail(60))  # shown with a failure


def pairs_of_letters(vocab: int) -> dict[str, torch.Tensor]:
    """A Markov head of how often a byte follows another in English."""
    text, counts = list("\n".join(held_out_prompts()).encode()), torch.full((vocab, vocab), 0.05)
    for before, after in pairwise(text):
        counts[before, after] += 1
    u, s, v = torch.linalg.svd(2 * (counts / counts.sum(1, keepdim=True)).log())
    kept = s[:RANK].sqrt()
    w1, w2 = u[:, :RANK] * kept, v[:RANK].T * kept
    return {"markov_head.markov_w1.weight": w1.contiguous(), "markov_head.markov_w2.weight": w2.contiguous()}


@works
def test_greedy_output_is_plain_decodings_at_every_width_and_accept_length(ours, kind, expected):
    assert f"block: {ROWS + 1} (trained {ROWS + 1})" in ours.log_text()
    head = "rank 32" if kind == "vanilla" else f"{kind}, rank 32"
    assert f"\n  proposals_from: the anchor's row\n  markov_head: {head}\n  proposals: drawn" in ours.log_text()
    with ThreadPoolExecutor(len(expected)) as pool:
        answers = list(pool.map(lambda prompt: ours.generate(**request(prompt)), prompts()))
    answers += [ours.generate(**request(prompt)) for prompt in prompts()]
    assert [answer["output_ids"] for answer in answers] == expected * 2
    histogram = [0] * (ROWS + 1)
    for answer in answers:
        for accepted, count in enumerate(answer["meta_info"]["spec_correct_drafts_histogram"]):
            histogram[accepted] += count
    assert sum(count > 0 for count in histogram) >= 6, f"accepted proposals per step: {histogram}"
    (state,) = ours.get("/server_info")["internal_states"]
    assert min(state["dflash_width"]["steps"].values()) > 0


@works
def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests(ours, target, expected):
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: [ours.generate(**request(prompt))["output_ids"] for prompt in prompts()])
        sampled = draws(ours)
        assert beside.result() == expected
    assert_distributed(sampled, three_tokens(target))


@pytest.mark.full
@pytest.mark.matrix(target="Qwen3", draft="speculators DSpark", kv="model dtype, two ranks", outcome="works")
def test_two_ranks_that_draw_apart_take_the_same_walks(tmp_path, kind):
    """Random models, whose tokens lie in the shards of both ranks."""
    shape = dict(num_key_value_heads=1, vocab_size=40, tie_word_embeddings=True)
    target, _ = tiny.make_pair(tmp_path / "pair", target=shape)
    config = dspark_config(**shape, markov_head_type=kind)
    fields = dict(
        speculators_model_type="dspark",
        architectures=["Qwen3DSparkModel"],
        markov_rank=config["markov_rank"],
        markov_head_type=kind,
        sample_from_anchor=True,
    )
    draft = write_checkpoint(tmp_path / "draft", speculators_config(config, **fields), dspark_tensors(config))
    ids = random.Random(0)
    asked = [request([ids.randrange(4, 40) for _ in range(length)]) for length in (3, 17, 64)]
    outputs = test_parallel.continuations(target, [one["input_ids"] for one in asked])
    with serve(
        target, draft, environment=test_parallel.watched(tmp_path), tp_size=2, **test_parallel.RANKS
    ) as server:
        test_parallel.assert_ranks_take_the_same_walks(server, asked, outputs, tmp_path)
