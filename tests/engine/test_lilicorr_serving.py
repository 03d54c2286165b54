"""A LiLiCorr draft behind a real server in float32: lossless at every width, accepted as the reference loop
accepts (C18), sampled output of the target's distribution (C16), tensor parallel (C21).

The draft is the trained plain one with a random head that favours the likeliest candidates, and once with random
convolutions, near enough to nothing that it is still accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_parallel
from tests.engine.test_dflash2_serving import (
    PLAIN_DRAFT,
    SCALE,
    TARGET,
    TINY,
    asked_together,
    assert_accepted_as_in_the_reference_loop,
    assert_plain_at_every_width,
    assert_ranks_walk_alike,
    assert_sampled_beside_greedy,
    expected,
    prompts,
    request,
    target,
)
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import serve
from tests.support.reference_lilicorr import (
    CONVOLUTIONS,
    SIZES,
    ReferenceLiLiCorr,
    added_tensors,
    lilicorr_config,
    lilicorr_tensors,
)
from tests.support.tiny import write_checkpoint

__all__ = ["expected", "target"]
pytestmark = pytest.mark.slow
PLAIN, CONVOLVED = "LiLiCorr", "LiLiCorr with convolutions"
LAYERS: dict[str, dict[str, Any]] = {PLAIN: {}, CONVOLVED: CONVOLUTIONS}


def family(name: str, kv: str = "model dtype", *marks: pytest.MarkDecorator) -> Any:
    works = pytest.mark.matrix(target="Qwen3", draft=name, kv=kv, outcome="works")
    return pytest.param(name, id=name, marks=(works, *marks))


def config_and_tensors(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The head's rank embeddings turn a candidate's in-vector away from what out-vectors have in common."""
    config = json.loads((PLAIN_DRAFT / "config.json").read_text())
    config["architectures"] = ["LiLiCorrDraftModel"]
    config["dflash_config"] |= SIZES | LAYERS[name]
    added = added_tensors(config, scale=SCALE)
    angles = torch.linspace(0, 1.5, SIZES["lilicorr_candidate_topk"])
    added["lilicorr.rank_embedding"][0, 0, 0, :, :2] += 3 * torch.stack((angles.cos(), angles.sin()), dim=-1)
    added["lilicorr.factor_input_proj.weight"][:2, :2] += torch.eye(2)
    added["lilicorr.in_head.weight"][:2, :2] += torch.eye(2)
    for name in ("out_head", "anchor_out_head"):
        added[f"lilicorr.{name}.bias"][0] += 2
    added = {name: tensor.bfloat16() for name, tensor in added.items()}
    return config, {**load_file(PLAIN_DRAFT / "model.safetensors"), **added}


class Draft(NamedTuple):
    name: str  # of LAYERS
    path: Path


@pytest.fixture(scope="module", params=[family(PLAIN), family(CONVOLVED, "model dtype", pytest.mark.full)])
def draft(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    directory = tmp_path_factory.mktemp("lilicorr") / "draft"
    return Draft(request.param, write_checkpoint(directory, *config_and_tensors(request.param)))


@pytest.fixture(scope="module")
def ours(
    draft: Draft, tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]
) -> Iterator[tuple[Server, Path]]:
    """(server, directory of the oracle's records): blocks of any width, in graphs; rejected rows are poisoned
    after every step."""
    records = tmp_path_factory.mktemp("records")
    environment = recorded_graphs.recording(
        records, "widths,oracle,poison", **{CONFIG_ENV: '{"copy": "off", "width": {}}'}
    )
    with serve(TARGET, draft.path, environment=environment, max_running_requests=48, page_size=16) as server:
        yield server, records
        print(server.log_tail(60))  # shown with a failure
    replayed = recorded_graphs.replays(records)
    assert sum(one.role == "draft" for one in replayed) > 100


def test_greedy_output_is_plain_decodings_at_every_width_and_accept_length(ours, draft, expected):
    server, records = ours
    layers = "none" if draft.name == PLAIN else "3 taps, groups of 16"
    head = "\n  lilicorr: 2 layers of 48 over 8 candidates\n  proposals: drawn"
    assert f"\n  convolution: {layers}{head}" in server.log_text()
    for prompt, output in zip(prompts(), expected, strict=True):
        scheduler_hooks.record(records, prompt, output)
    assert_plain_at_every_width(server, expected, at_least=8)
    scheduler_hooks.forget(records)


def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests(ours, target, expected):
    assert_sampled_beside_greedy(ours[0], target, expected, often=0.02)


@pytest.mark.parametrize("graphs", [True, False], ids=["in graphs", "eager"])
def test_blocks_are_accepted_as_the_reference_loop_accepts_them(draft, target, expected, tmp_path, graphs):
    """Another context row than the last committed token's would be accepted otherwise."""
    reference = ReferenceLiLiCorr.of_target(*config_and_tensors(draft.name), target.get_input_embeddings())
    environment = recorded_graphs.recording(tmp_path) if graphs else {"DFLASH_SGLANG_REQUIRE": "1"}
    environment[CONFIG_ENV] = '{"copy": "off"}'
    with serve(TARGET, draft.path, environment=environment, max_running_requests=48) as server:
        answers = asked_together(server)
    assert [answer["output_ids"] for answer in answers] == expected
    assert_accepted_as_in_the_reference_loop(answers, target, reference, more_than=1.5)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [family(PLAIN, "model dtype, two ranks", pytest.mark.release), family(CONVOLVED, "model dtype, two ranks")],
)
def test_two_ranks_that_draw_apart_take_the_same_walks(tmp_path, name):
    """Random models, whose tokens lie in the shards of both ranks."""
    config = lilicorr_config(**TINY, dflash_config=LAYERS[name])
    path = write_checkpoint(tmp_path / "draft", config, lilicorr_tensors(config))
    assert_ranks_walk_alike(path, tmp_path)


@pytest.mark.full
def test_ranks_with_batches_of_their_own_embed_their_own_candidates(tmp_path, expected):
    """Data-parallel attention with a head that all ranks share: requests on one rank beside few and none on the
    other."""
    layout = dict(tp_size=2, dp_size=2, enable_dp_attention=True)
    asked = [dict(request(prompt), routed_dp_rank=int(i > 1)) for i, prompt in enumerate(prompts())]
    environment = {"DFLASH_SGLANG_REQUIRE": "1", CONFIG_ENV: '{"width": {}}'}
    draft = write_checkpoint(tmp_path, *config_and_tensors(PLAIN))
    with serve(TARGET, draft, environment=environment, **layout, **test_parallel.RANKS) as server:
        alone = test_parallel.ask(server, asked[-1:], together=True)
        together = test_parallel.ask(server, asked, together=True)
    assert [one["output_ids"] for one in (*alone, *together)] == [expected[-1], *expected]
    steps = sum(one["meta_info"]["spec_verify_ct"] for one in together)
    assert sum(len(one["output_ids"]) for one in together) > 1.2 * steps
