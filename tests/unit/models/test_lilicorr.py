"""LiLiCorr drafts: the served model and its walks against plain PyTorch, its context rows, and its config."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import foreign
from tests.support import sglang_layers as layers
from tests.support.reference_lilicorr import (
    CONVOLUTIONS,
    ReferenceLiLiCorr,
    lilicorr_config,
    lilicorr_tensors,
)
from tests.support.reference_walks import assert_equals_the_reference
from tests.support.tiny import draft_config, write_checkpoint
from tests.unit.models.test_dflash2 import Target

pytestmark = layers.cpu_only

works = pytest.mark.matrix(target="Qwen3", draft="LiLiCorr", kv="model dtype", outcome="works")


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


def make_draft(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    from dflash_sglang.models.lilicorr import LiLiCorrDraftModel

    write_checkpoint(directory, config, tensors)
    with layers.defaults(torch.float32):
        model = LiLiCorrDraftModel(layers.hf_config(directory))
        model.load_weights(tensors.items())
    return model


VARIANTS: dict[str, dict[str, Any]] = {
    "a head narrower than the draft": {},
    "a head as wide as the draft, 16 candidates": dict(lilicorr_hidden_size=0, lilicorr_candidate_topk=16),
}
convolved = pytest.mark.matrix(
    target="Qwen3", draft="LiLiCorr with convolutions", kv="model dtype", outcome="works"
)
DRAFTS = [
    *(pytest.param(sizes, id=name, marks=works) for name, sizes in VARIANTS.items()),
    pytest.param(CONVOLUTIONS, id="with convolutions", marks=convolved),
]


@pytest.mark.parametrize("sizes", DRAFTS)
@pytest.mark.parametrize("block", [5, 8, 16])
def test_rows_proposals_and_q_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, block, sizes
):
    """Blocks of 5 are served narrower than trained."""
    from dflash_sglang.models.context_kv.last_rows import LastRows

    config = lilicorr_config(block_size=max(block, 8), dflash_config=sizes)
    tensors, target = lilicorr_tensors(config), Target()
    model = make_draft(tmp_path, config, tensors)
    model.serve_blocks_of(block)
    model.bind_target(target)
    model.last_rows = LastRows(3, block, config["hidden_size"], torch.float32, "cpu")
    assert not model.spec.anchor_proposes
    reference = ReferenceLiLiCorr.of_target(config, tensors, target.model.embed_tokens, served=block)
    assert_equals_the_reference(model, reference, target.lm_head, block, lambda hidden: hidden[1:])


def test_a_block_without_a_context_row_is_scored_as_if_that_row_projected_to_zero(tmp_path):
    from dflash_sglang.models.context_kv.last_rows import LastRows

    config = lilicorr_config()
    tensors = lilicorr_tensors(config)
    model, target = make_draft(tmp_path, config, tensors), Target()
    model.bind_target(target)
    generator = torch.Generator().manual_seed(5)
    rows, embeddings = torch.randn(1, 7, 64, generator=generator), torch.randn(1, 7, 8, 64, generator=generator)
    logprobs = torch.randn(1, 7, 320, generator=generator).log_softmax(-1).topk(8).values
    last_rows = LastRows(2, 8, 64, torch.float32, "cpu")
    last_rows.write(torch.full((1, 64), 3.0), torch.tensor([20]), torch.tensor([1]))
    expected = ReferenceLiLiCorr.of_target(config, tensors, target.model.embed_tokens).head
    for position, context in ((20, torch.full((64,), 3.0)), (12, None)):  # which shares its place with 20
        got = model.lilicorr.scores(
            rows, embeddings, logprobs, last_rows.at(torch.tensor([1]), torch.tensor([position]))
        )
        with torch.no_grad():
            wanted = expected.edges(rows[0], logprobs[0], embeddings[0], context)
        torch.testing.assert_close(got[0, 1:], torch.tensor(wanted[1:]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[0, 0], torch.tensor(wanted[0]).expand(8, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=VARIANTS)
def test_scores_are_those_of_sglangs_own_head(tmp_path, sizes):
    """Of a block that is served narrower than trained."""
    from sglang.srt.models.lilicorr import LiLiCorrHead
    from sglang.srt.speculative.lilicorr_utils import parse_lilicorr_draft_config

    from dflash_sglang.models.context_kv.last_rows import Context

    config = lilicorr_config(dflash_config=sizes)
    tensors = lilicorr_tensors(config)
    model = make_draft(tmp_path, config, tensors)
    read = parse_lilicorr_draft_config(draft_hf_config=SimpleNamespace(**config))
    with layers.defaults(torch.float32):
        theirs = LiLiCorrHead(model_hidden_size=64, block_size=8, rms_norm_eps=1e-6, config=read)
    of_head = {name.removeprefix("lilicorr."): t for name, t in tensors.items() if name.startswith("lilicorr.")}
    theirs.load_state_dict(of_head)
    theirs.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    theirs.set_active_block_size(6)
    generator, count = torch.Generator().manual_seed(9), read.candidate_topk
    rows, context = (torch.randn(3, *shape, generator=generator) for shape in ((5, 64), (64,)))
    embeddings = torch.randn(3, 5, count, 64, generator=generator)
    logprobs = torch.randn(3, 5, 320, generator=generator).log_softmax(-1).topk(count).values
    known = torch.tensor([True, True, False])
    with torch.no_grad():
        scores = theirs.score(
            token_embeddings=embeddings[:, None],
            candidate_log_probs=logprobs[:, None],
            pass_hidden=rows[:, None],
            anchor_hidden=context[:, None],
            anchor_valid=known[:, None],
        )
        start, pairs = theirs.log_factors(*scores)
        got = model.lilicorr.scores(rows, embeddings, logprobs, Context(context, known))
    torch.testing.assert_close(got[:, 1:], pairs[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[:, 0], start[:, 0, None].expand(-1, count, -1), rtol=1e-4, atol=1e-4)


def test_rows_of_ragged_steps_belong_to_their_requests():
    from dflash_sglang.models.context_kv.last_rows import requests_of_rows

    requests = torch.tensor([4, 2, 7])
    assert requests_of_rows(requests, 6, None).tolist() == [4, 4, 2, 2, 7, 7]
    starts = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    assert requests_of_rows(requests, 5, starts).tolist() == [4, 4, 4, 7, 7]
    assert requests_of_rows(requests, 5, torch.zeros_like(starts)).tolist() == [7] * 5  # of a capture


def test_fields_stand_in_dflash_config_or_at_the_top_level():
    config = lilicorr_config()
    nested = config.pop("dflash_config")
    flat = {**config, **nested}
    assert foreign(flat) is None
    assert DraftSpec.from_config(flat) == DraftSpec.from_config({**config, "dflash_config": nested})
    assert DraftSpec.from_config(draft_config()).lilicorr is None


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("lilicorr_enabled", False, "true or none in a draft of the architecture LiLiCorrDraftModel"),
        ("lilicorr_candidate_topk", None, "an integer >= 1"),
        ("lilicorr_candidate_topk", 32, "an integer of at most 16"),
        ("lilicorr_hidden_size", None, "an integer >= 0"),
        ("lilicorr_num_layers", 0, "an integer >= 1"),
        ("lilicorr_num_heads", 5, "a divisor of the head's hidden size of 48"),
        ("lilicorr_mlp_ratio", None, "a positive number"),
        ("lilicorr_factor_dim", 1.5, "an integer >= 1"),
        ("lilicorr_vector_eps", 0, "a positive number"),
        ("lilicorr_logit_scale", "6", "a positive number"),
        ("draft_vocab_size", 40, "none, or vocab_size=320: LiLiCorr was trained on the likeliest tokens of all"),
    ],
)
def test_a_head_that_cannot_be_served_is_refused_by_its_field(field, value, expected):
    config = lilicorr_config(dflash_config={field: value})
    place = field if value is None else f"dflash_config.{field}"
    with pytest.raises(DraftConfigError, match=f"draft config {place}={value!r}: expected {expected}"):
        DraftSpec.from_config(config)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [({}, "lilicorr.layers.1.attn.in_proj_bias"), (CONVOLUTIONS, "layers.1.mlp_conv.base_kernel")],
    ids=["of the head", "of a convolution"],
)
def test_a_missing_tensor_is_an_error_that_names_it(tmp_path, sizes, name):
    config = lilicorr_config(dflash_config=sizes)
    tensors = lilicorr_tensors(config)
    del tensors[name]
    with pytest.raises(ValueError, match=rf"missing tensors \['{name}'\]"):
        make_draft(tmp_path, config, tensors)


def test_a_convolution_without_its_group_size_is_refused():
    config = lilicorr_config(dflash_config={**CONVOLUTIONS, "conv_group_size": None})
    with pytest.raises(DraftConfigError, match=r"conv_group_size=None: expected its value beside .*kernel_size=3"):
        DraftSpec.from_config(config)
