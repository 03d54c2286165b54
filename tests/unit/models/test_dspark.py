"""DSpark drafts: the served model and its walks against plain PyTorch, and its config."""

from __future__ import annotations

import pytest

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import foreign
from tests.support import sglang_layers as layers
from tests.support.draft_formats import speculators_config
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
    [("markov_rank", None, "the rank of the Markov head"), ("draft_vocab_size", 40, "a row for every token")],
)
def test_a_markov_head_that_cannot_be_served_is_refused_by_its_field(field, value, expected):
    with pytest.raises(DraftConfigError, match=f"draft config {field}={value}: expected .*{expected}"):
        DraftSpec.from_config({**dspark_config(), field: value})
