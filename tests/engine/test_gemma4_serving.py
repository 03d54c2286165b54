"""A DSpark draft of Gemma 4's layers behind a real server in float32: lossless at every width beside the Gemma 4
target of the zoo and beside a trained one, sampled output of its distribution (C16), tensor parallel (C21).

Beside the trained target the draft's rows say little but how often each byte is, and its Markov head decides.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash_sglang.demo.server import Server
from dflash_sglang.pair import held_out_prompts
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_dflash2_serving import (
    TARGET,
    TINY,
    assert_accept_lengths,
    assert_every_width_ran,
    assert_plain_at_every_width,
    assert_ranks_walk_alike,
    assert_sampled_beside_greedy,
    expected,
    prompts,
    target,
)
from tests.engine.test_dspark_serving import RANK, pairs_of_letters
from tests.support import scheduler_hooks
from tests.support.engines import greedy, serve
from tests.support.reference_gemma4 import gemma4_config, gemma4_tensors
from tests.support.tiny import write_checkpoint
from tests.zoo import pair

__all__ = ["expected", "target"]
pytestmark = [pytest.mark.slow, pytest.mark.full]
ROWS = 7
DRAFT = "DSpark of Gemma 4's layers"


def letters_draft(directory: Path) -> Path:
    """Channel 0 of a row is one number in every row, and gives the head how often a byte is."""
    of_target = json.loads((TARGET / "config.json").read_text())
    sizes = {name: of_target[name] for name in ("hidden_size", "vocab_size")}
    config = gemma4_config(**sizes, markov_rank=RANK, num_target_layers=of_target["num_hidden_layers"])
    config["target_layer_ids"] = [0, of_target["num_hidden_layers"] - 1]
    tensors = gemma4_tensors(config)
    tensors["embed_tokens.weight"][:, 0] = 8.0
    counts = torch.full((config["vocab_size"],), 0.05)
    for byte, count in Counter("\n".join(held_out_prompts()).encode()).items():
        counts[byte] += count
    often = (counts / counts.sum()).log()
    tensors["lm_head.weight"] *= 0.1
    tensors["lm_head.weight"][:, 0] = (often - often.mean()) / config["hidden_size"] ** 0.5
    return write_checkpoint(directory, config, {**tensors, **pairs_of_letters(config["vocab_size"])})


def watched(directory: Path, asked: list[list[int]], outputs: list[list[int]]) -> dict[str, str]:
    """Of a server whose blocks have another width at every step and take proposals of these outputs now and then,
    and whose rejected rows are poisoned."""
    records = directory / "records"
    records.mkdir()
    for prompt, output in zip(asked, outputs, strict=True):
        scheduler_hooks.record(records, prompt, output)
    return {
        "DFLASH_SGLANG_REQUIRE": "1",
        "PYTHONPATH": scheduler_hooks.install(directory / "hooks"),
        scheduler_hooks.HOOKS_ENV: "widths,oracle,poison",
        scheduler_hooks.RECORDS_ENV: str(records),
        CONFIG_ENV: '{"copy": "off", "width": {}}',
    }


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("gemma4")
    draft = letters_draft(directory / "draft")
    environment = watched(directory, prompts(), expected)
    with serve(TARGET, draft, environment=environment, max_running_requests=48, page_size=16) as server:
        yield server
        print(server.log_tail(60))  # shown with a failure


works = pytest.mark.matrix(target="Qwen3", draft=DRAFT, kv="model dtype", outcome="works")


@works
def test_greedy_output_is_plain_decodings_at_every_width_and_accept_length(ours, expected):
    log = ours.log_text()
    assert "draft: Gemma4DSparkModel (2 layers)" in log and f"block: {ROWS + 1} (trained {ROWS + 1})" in log
    assert_plain_at_every_width(ours, expected, at_least=6)


@works
def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests(ours, target, expected):
    assert_sampled_beside_greedy(ours, target, expected)


@pytest.mark.matrix(target="Gemma 4", draft=DRAFT, kv="model dtype", outcome="works")
def test_greedy_output_beside_gemma_4_is_plain_decodings_at_every_width_and_accept_length(tmp_path):
    config = gemma4_config()
    draft = write_checkpoint(tmp_path / "draft", config, gemma4_tensors(config))
    gemma, limits = pair("Gemma 4")[0], dict(chunked_prefill_size=64, max_total_tokens=4096)
    ids = torch.Generator().manual_seed(7)
    asked = [torch.randint(4, 250, (n,), generator=ids).tolist() for n in (5, 33, 100, 200)]
    with serve(gemma, **limits) as server:
        plain = greedy(server, asked, 48)
    environment = watched(tmp_path, asked, plain)
    with serve(gemma, draft, environment=environment, **limits) as server:
        params = dict(temperature=0, max_new_tokens=48, ignore_eos=True)
        answers = [server.generate(input_ids=prompt, sampling_params=params) for prompt in asked * 2]
        assert [answer["output_ids"] for answer in answers] == plain * 2
        assert_accept_lengths(answers, at_least=5)
        assert_every_width_ran(server)


@pytest.mark.matrix(target="Qwen3", draft=DRAFT, kv="model dtype, two ranks", outcome="works")
def test_two_ranks_that_draw_apart_take_the_same_walks(tmp_path):
    """Random models, whose tokens lie in the shards of both ranks, and one head of keys that both have."""
    config = gemma4_config(vocab_size=TINY["vocab_size"])
    assert_ranks_walk_alike(write_checkpoint(tmp_path / "draft", config, gemma4_tensors(config)), tmp_path)
