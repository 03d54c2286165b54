"""DSpark drafts: the served model and its walks against plain PyTorch, and its config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import foreign
from dflash_sglang.startup.facts import LoadError
from tests.support import sglang_layers as layers
from tests.support.draft_formats import matrix, speculators_config, vocabulary_tensors
from tests.support.reference_dspark import ReferenceDSpark, dspark_config, dspark_tensors
from tests.support.reference_walks import assert_equals_the_reference
from tests.unit.models.test_dflash2 import Target

pytestmark = layers.cpu_only

works = pytest.mark.matrix(target="Qwen3", draft="DSpark", kv="model dtype", outcome="works")


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


@works
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("block", [5, 8, 16])
def test_rows_proposals_and_q_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, block, kind
):
    config = dspark_config(block_size=block - 1, markov_head_type=kind)
    model, target = layers.load_draft(tmp_path, config, dspark_tensors(config)), Target()
    model.bind_target(target)
    assert (model.spec.block_size, model.spec.draft_rows(block)) == (block, block - 1)
    reference = ReferenceDSpark.from_weights(config, dspark_tensors(config))
    assert_equals_the_reference(model, reference, target.lm_head, block, proposing=lambda rows: rows)


REDUCED = [int(token) for token in torch.randperm(320, generator=torch.Generator().manual_seed(4))[:60]]


def reduced(kind: str, block: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    """z-lab's and the speculators config, and tensors, of a draft that knows the tokens REDUCED, in this order."""
    config = dspark_config(block_size=block - 1, markov_head_type=kind, draft_vocab_size=len(REDUCED))
    tensors = dspark_tensors(config) | vocabulary_tensors(REDUCED, 320)
    tensors["lm_head.weight"] = matrix(len(REDUCED), 64, 12)
    written = speculators_config(
        config,
        speculators_model_type="dspark",
        architectures=["Qwen3DSparkModel"],
        draft_vocab_size=len(REDUCED),
        markov_rank=config["markov_rank"],
        markov_head_type=kind,
        sample_from_anchor=True,
        sliding_window_non_causal=True,
    )
    return config, written, tensors


@pytest.mark.matrix(
    target="Qwen3", draft="speculators DSpark, a reduced vocabulary", kv="model dtype", outcome="works"
)
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("block", [5, 8, 16])
def test_a_reduced_vocabulary_scores_by_the_rows_of_its_own_tokens(tmp_path, block, kind):
    """Anchors are any of the target's tokens; `assert_equals_the_reference` has three steps."""
    config, written, tensors = reduced(kind, block)
    model = layers.load_draft(tmp_path, written, tensors)
    model.bind_target(Target())
    head = nn.Linear(64, len(REDUCED), bias=False)
    head.weight.data = tensors["lm_head.weight"]
    reference = ReferenceDSpark.from_weights(config, tensors)
    assert_equals_the_reference(model, reference, head, block, proposing=lambda rows: rows)


def test_an_update_puts_rows_of_a_reduced_vocabulary_where_loading_did(tmp_path):
    _, written, tensors = reduced("vanilla", 8)
    model = layers.load_draft(tmp_path, written, tensors)
    model.bind_target(Target())
    new = tensors["markov_head.markov_w2.weight"] + 1
    model.load_weights([("markov_head.markov_w2.weight", new)])
    assert torch.equal(model.edges.codebooks.successor[REDUCED], new)


def test_rows_of_another_number_than_the_reduced_vocabulary_are_refused(tmp_path):
    _, written, tensors = reduced("vanilla", 8)
    tensors["markov_head.markov_w2.weight"] = torch.zeros(320, 12)
    with pytest.raises(
        LoadError, match=r"'markov_head.markov_w2.weight' of shape \(320, 12\).*expected shape \(60, 12\)"
    ):
        layers.load_draft(tmp_path, written, tensors)


@works
def test_rows_of_a_padded_head_and_of_its_matrix_propose_nothing(tmp_path):
    config = dspark_config(draft_vocab_size=384)
    own = torch.cat((matrix(320, 64, 12), 100 * matrix(64, 64, 13)))
    tensors = dspark_tensors(config) | {"lm_head.weight": own}
    model, head = layers.load_draft(tmp_path, config, tensors), nn.Linear(64, 320, bias=False)
    model.bind_target(Target(), vocab_size=320)
    head.weight.data = own[:320]
    reference = ReferenceDSpark.from_weights(config, tensors)
    assert_equals_the_reference(model, reference, head, 8, proposing=lambda rows: rows)


def test_both_formats_say_the_same_and_the_anchors_row_proposes_unless_the_config_says_otherwise():
    zlab = dspark_config()
    written = speculators_config(
        zlab,
        speculators_model_type="dspark",
        architectures=["Qwen3DSparkModel"],
        markov_rank=12,
        sample_from_anchor=True,
    )
    for config in (zlab, written):
        assert foreign(config) is None
        spec = DraftSpec.from_config(config)
        assert (spec.block_size, spec.draft_rows(8), spec.draft_rows(2)) == (8, 7, 1)
        spec = DraftSpec.from_config({**config, "sample_from_anchor": False})
        assert (spec.block_size, spec.draft_rows(7)) == (7, 7)


def test_other_markov_heads_are_the_built_in_workers():
    other = foreign(dspark_config(markov_head_type="lstm"))
    assert str(other) == (
        "draft config markov_head_type='lstm': a Markov head of another kind. "
        "SGLang's built-in DFlashWorkerV2 serves it, not dflash_sglang."
    )


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("markov_rank", None, "the field to be present"), ("markov_rank", -1, "an integer >= 0")],
)
def test_a_markov_head_that_cannot_be_served_is_refused_by_its_field(field, value, expected):
    with pytest.raises(DraftConfigError, match=f"draft config {field}={value}: expected .*{expected}"):
        DraftSpec.from_config({**dspark_config(), field: value})
