"""A DSpark draft behind a real server in float32: lossless at every width, sampled output of the target's
distribution (C16), tensor parallel (C21).

The draft is the trained plain one with a Markov head of pairs of letters. Its rows were trained for the token of
their own place and propose the next one, so that the head decides, and is accepted now and then.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_dflash2_serving import (
    PLAIN_DRAFT,
    TARGET,
    TINY,
    assert_plain_at_every_width,
    assert_ranks_walk_alike,
    assert_sampled_beside_greedy,
    expected,
    letter_logprobs,
    prompts,
    target,
    write_trained,
)
from tests.support import scheduler_hooks
from tests.support.draft_formats import matrix, speculators_config, vocabulary_tensors
from tests.support.engines import serve
from tests.support.reference_dspark import added_tensors, dspark_config, dspark_tensors
from tests.support.tiny import write_checkpoint

__all__ = ["expected", "target"]
pytestmark = pytest.mark.slow
ROWS, RANK = 7, 32
REDUCED = "vanilla, a reduced vocabulary"
KEPT = random.Random(5).sample(range(256), 160)  # tokens of it, in its order
works = pytest.mark.matrix(target="Qwen3", draft="DSpark", kv="model dtype", outcome="works")


def dspark_draft(directory: Path, kind: str = "vanilla") -> Path:
    """The trained plain draft with `pairs_of_letters`: under a gate that is nearly open, through a state that
    keeps nothing, or of a part of the tokens, with their rows of the target's head."""
    config = json.loads((PLAIN_DRAFT / "config.json").read_text())
    config |= dict(architectures=["Qwen3DSparkModel"], block_size=ROWS, markov_rank=RANK)
    config |= dict(markov_head_type="vanilla" if kind == REDUCED else kind)
    added = {**added_tensors(config), **pairs_of_letters(config["vocab_size"])}
    if kind == REDUCED:
        config["draft_vocab_size"] = len(KEPT)
        added["markov_head.markov_w2.weight"] = added["markov_head.markov_w2.weight"][KEPT]
        added["lm_head.weight"] = load_file(TARGET / "model.safetensors")["lm_head.weight"][KEPT]
        added |= vocabulary_tensors(KEPT, config["vocab_size"])
    if kind == "gated":
        added["markov_head.gate_proj.weight"] *= 0.1
        added["markov_head.gate_proj.bias"] = torch.full((RANK,), 4.0)
    if kind == "rnn":
        joint = added["markov_head.joint_proj.weight"].zero_()
        joint[2 * RANK :, RANK : 2 * RANK].fill_diagonal_(0.02)
        added["markov_head.joint_proj.bias"].zero_()
        added["markov_head.markov_w2.weight"] *= 50
    return write_trained(directory, config, added)


@pytest.fixture(
    scope="module", params=["vanilla", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("rnn", REDUCED))]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]], kind: str) -> Iterator[Server]:
    """Blocks of any width; rejected rows are poisoned after every step."""
    draft = dspark_draft(tmp_path_factory.mktemp("dspark") / "draft", kind)
    records = tmp_path_factory.mktemp("records")
    for prompt, output in zip(prompts(), expected, strict=True):
        scheduler_hooks.record(records, prompt, output)
    environment = scheduler_hooks.hooked(
        records, "widths,oracle,poison", **{CONFIG_ENV: '{"copy": "off", "width": {}}'}
    )
    with serve(TARGET, draft, environment=environment, max_running_requests=48, page_size=16) as server:
        yield server
        print(server.log_tail(60))  # shown with a failure


def pairs_of_letters(vocab: int) -> dict[str, torch.Tensor]:
    """A Markov head of how often a byte follows another in English."""
    u, s, v = torch.linalg.svd(3 * letter_logprobs(vocab))
    kept = s[:RANK].sqrt()
    w1, w2 = u[:, :RANK] * kept, v[:RANK].T * kept
    return {"markov_head.markov_w1.weight": w1.contiguous(), "markov_head.markov_w2.weight": w2.contiguous()}


@works
def test_greedy_output_is_plain_decodings_at_every_width_and_accept_length(ours, kind, expected):
    assert f"block: {ROWS + 1} (trained {ROWS + 1})" in ours.log_text()
    head = "rnn, rank 32" if kind == "rnn" else "rank 32"
    assert f"\n  proposals_from: the anchor's row\n  markov_head: {head}\n  proposals: drawn" in ours.log_text()
    assert_plain_at_every_width(ours, expected, at_least=6)


@works
def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests(ours, target, expected):
    assert_sampled_beside_greedy(ours, target, expected)


@pytest.mark.full
@pytest.mark.matrix(target="Qwen3", draft="speculators DSpark", kv="model dtype, two ranks", outcome="works")
def test_two_ranks_that_draw_apart_take_the_same_walks(tmp_path, kind):
    """Random models, whose tokens lie in the shards of both ranks."""
    kept = random.Random(6).sample(range(40), 24) if kind == REDUCED else None
    form = dict(markov_head_type="rnn" if kind == "rnn" else "vanilla")
    if kept is not None:
        form["draft_vocab_size"] = len(kept)
    config = dspark_config(**TINY, **form)
    fields = dict(
        speculators_model_type="dspark",
        architectures=["Qwen3DSparkModel"],
        markov_rank=config["markov_rank"],
        sample_from_anchor=True,
        **form,
    )
    tensors = dspark_tensors(config)
    if kept is not None:
        tensors |= vocabulary_tensors(kept, 40) | {"lm_head.weight": matrix(len(kept), config["hidden_size"], 12)}
    draft = write_checkpoint(tmp_path / "draft", speculators_config(config, **fields), tensors)
    assert_ranks_walk_alike(draft, tmp_path)
