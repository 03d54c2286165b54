"""A Domino draft behind a real server in float32: lossless at every width, sampled output of the target's
distribution (C16), tensor parallel (C21).

The draft is the trained plain one with a GRU whose state tells the letter that comes next. Where labels are
shifted, its rows, which were trained for the token of their own place, propose the next one: the GRU decides, and
is accepted now and then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from dflash_sglang.demo.server import Server
from dflash_sglang.pair import held_out_prompts
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine import test_parallel
from tests.engine.test_dflash2_serving import (
    BLOCK,
    NEW_TOKENS,
    PLAIN_DRAFT,
    SAMPLED_PROMPT,
    SAMPLING,
    TARGET,
    TINY,
    assert_plain_at_every_width,
    assert_ranks_walk_alike,
    assert_sampled_beside_greedy,
    expected,
    letter_logprobs,
    prompts,
    request,
    target,
    write_trained,
)
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import serve
from tests.support.reference_domino import OF_DOMINO, domino_config, domino_tensors
from tests.support.tiny import write_checkpoint
from training.reference import plain_generate

__all__ = ["expected", "target"]
pytestmark = pytest.mark.slow
STATE, RANK = 192, 96
works = pytest.mark.matrix(target="Qwen3", draft="Domino", kv="model dtype", outcome="works")


def domino_draft(directory: Path, shifted: bool) -> Path:
    """The trained plain draft with `next_letters`, which count less where its rows know better."""
    config = json.loads((PLAIN_DRAFT / "config.json").read_text())
    sizes = dict(gru_hidden_dim=STATE, emb_dim=RANK)
    config["dflash_config"] |= {**OF_DOMINO, **sizes, "shift_label": shifted}
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].float()
    added = next_letters(embedding)
    added["embed_proj.2.weight"] *= 1 if shifted else 0.2
    return write_trained(directory, config, added)


def next_letters(embedding: torch.Tensor) -> dict[str, torch.Tensor]:
    """Domino's tensors for an embedding [vocab, hidden]: a GRU whose state is half of the state before and half of
    the token it reads, and scores of how often a byte follows the last one in English, as far as the state tells.
    """
    vocab, hidden = embedding.shape
    text = list("\n".join(held_out_prompts()).encode())
    generator = torch.Generator().manual_seed(5)
    read = torch.randn(STATE, hidden, generator=generator) / embedding.std() * hidden**-0.5
    of_state = torch.randn(RANK, STATE, generator=generator) * 4 * STATE**-0.5
    state, states = torch.zeros(STATE), []
    for row in torch.tanh(embedding[text[:20_000]] @ read.T):
        state = (state + row) / 2
        states.append(state)
    vectors = functional.silu(torch.stack(states) @ of_state.T)
    wanted = 2 * letter_logprobs(vocab)[text[: len(states)]]
    ridge = vectors.T @ vectors + torch.eye(RANK)
    return {
        "prefix_gru.weight_ih_l0": torch.cat((torch.zeros(2 * STATE, hidden), read)),
        "prefix_gru.weight_hh_l0": torch.zeros(3 * STATE, STATE),
        "embed_proj.0.weight": torch.cat((torch.zeros(RANK, hidden), of_state), dim=1),
        "embed_proj.2.weight": torch.linalg.solve(ridge, vectors.T @ wanted).T.contiguous(),
    }


@pytest.fixture(scope="module", params=[True, False], ids=["shifted", "in place"])
def shifted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]], shifted: bool) -> Iterator[Server]:
    """Blocks of any width, in graphs; rejected rows are poisoned after every step."""
    draft = domino_draft(tmp_path_factory.mktemp("domino") / "draft", shifted)
    records = tmp_path_factory.mktemp("records")
    for prompt, output in zip(prompts(), expected, strict=True):
        scheduler_hooks.record(records, prompt, output)
    environment = recorded_graphs.recording(
        records, "widths,oracle,poison", **{CONFIG_ENV: '{"copy": "off", "width": {}}'}
    )
    with serve(TARGET, draft, environment=environment, max_running_requests=48, page_size=16) as server:
        yield server
        print(server.log_tail(60))  # shown with a failure
    replayed = recorded_graphs.replays(records)
    assert sum(one.role == "draft" for one in replayed) > 100


@works
def test_greedy_output_is_plain_decodings_at_every_width_and_accept_length(ours, shifted, expected):
    assert f"block: {BLOCK} (trained {BLOCK})" in ours.log_text()
    first = "anchor" if shifted else "first mask"
    lines = f"\n  proposals_from: the {first}'s row\n  domino: GRU of {STATE}, rank {RANK}\n  proposals: drawn"
    assert lines in ours.log_text()
    assert_plain_at_every_width(ours, expected, at_least=8)


@works
def test_walks_of_graphs_are_accepted(ours, shifted, target):
    """Of a text that no oracle knows."""
    answer = ours.generate(**request(SAMPLED_PROMPT))
    assert answer["output_ids"] == plain_generate(target, SAMPLED_PROMPT, NEW_TOKENS, ignore_eos=True)
    steps = answer["meta_info"]["spec_verify_ct"]
    assert NEW_TOKENS > (1.0 if shifted else 1.5) * steps


@works
def test_sampled_tokens_follow_the_targets_distribution_beside_greedy_requests(ours, shifted, target, expected):
    assert_sampled_beside_greedy(ours, target, expected, often=0.1 * (not shifted))


@pytest.mark.full
@pytest.mark.matrix(target="Qwen3", draft="Domino", kv="model dtype, two ranks", outcome="works")
def test_two_ranks_that_draw_apart_take_the_same_walks(tmp_path, shifted):
    """Random models, whose tokens lie in the shards of both ranks."""
    config = domino_config(**TINY, dflash_config=dict(shift_label=shifted))
    draft = write_checkpoint(tmp_path / "draft", config, domino_tensors(config))
    assert_ranks_walk_alike(draft, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("whose_head", ["all ranks'", pytest.param("a rank's own", marks=pytest.mark.release)])
def test_ranks_with_batches_of_their_own_embed_their_own_walks(expected, tmp_path, whose_head):
    """Data-parallel attention: greedy and sampled requests on one rank beside few and none on the other."""
    draft = domino_draft(tmp_path / "draft", shifted=False)
    own = dict(enable_dp_lm_head=True) if whose_head == "a rank's own" else {}
    layout = dict(tp_size=2, dp_size=2, enable_dp_attention=True, **own)
    asked = [dict(request(prompt), routed_dp_rank=int(i > 1)) for i, prompt in enumerate(prompts())]
    drawn = dict(asked[0], sampling_params=asked[0]["sampling_params"] | SAMPLING)
    environment = {"DFLASH_SGLANG_REQUIRE": "1", CONFIG_ENV: '{"width": {}}'}
    with serve(TARGET, draft, environment=environment, **layout, **test_parallel.RANKS) as server:
        alone = test_parallel.ask(server, asked[-1:], together=True)
        *together, sampled = test_parallel.ask(server, [*asked, drawn], together=True)
    assert [one["output_ids"] for one in (*alone, *together)] == [expected[-1], *expected]
    steps = sum(one["meta_info"]["spec_verify_ct"] for one in together)
    assert sum(len(one["output_ids"]) for one in together) > 1.2 * steps
    assert len(sampled["output_ids"]) == 3
