"""Domino drafts: the served model and its walks against plain PyTorch, and its config."""

from __future__ import annotations

import pytest

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import foreign
from tests.support import sglang_layers as layers
from tests.support.reference_domino import ReferenceDomino, domino_config, domino_tensors
from tests.support.reference_walks import assert_equals_the_reference
from tests.unit.models.test_dflash2 import Target

pytestmark = layers.cpu_only

works = pytest.mark.matrix(target="Qwen3", draft="Domino", kv="model dtype", outcome="works")


@pytest.fixture(scope="module", autouse=True)
def rank() -> None:
    layers.start_rank()


@works
@pytest.mark.parametrize("shifted", [True, False], ids=["shifted", "in place"])
@pytest.mark.parametrize("block", [5, 8, 16])
def test_rows_proposals_and_q_equal_the_reference_over_three_steps_of_different_accept_lengths(
    tmp_path, block, shifted
):
    config = domino_config(block_size=block, dflash_config=dict(shift_label=shifted))
    tensors, target = domino_tensors(config), Target()
    model = layers.make_draft(tmp_path, tensors=tensors, **config)
    model.bind_target(target)
    assert (model.spec.block_size, model.spec.draft_rows(block)) == (block, block)
    assert model.spec.anchor_proposes == shifted
    reference = ReferenceDomino.of_target(config, tensors, target.model.embed_tokens)
    assert_equals_the_reference(model, reference, target.lm_head, block, reference.proposing)


def test_fields_stand_in_dflash_config_or_at_the_top_level():
    config = domino_config()
    nested = config.pop("dflash_config")
    flat = {**config, **nested}
    assert foreign(flat) is None
    assert DraftSpec.from_config(flat) == DraftSpec.from_config({**config, "dflash_config": nested})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("pure_draft_prefix_len", 2, "1: the first proposal is the row's own"),
        ("pure_draft_prefix_len", None, "the field to be present"),
        ("gru_hidden_dim", None, "the field to be present"),
        ("emb_dim", 0, "an integer >= 1"),
        ("shift_label", None, "the field to be present"),
        ("shift_label", 1, "true or false"),
        ("draft_vocab_size", 40, "none, or vocab_size=320: Domino's projector has a row for every token"),
    ],
)
def test_a_projector_that_cannot_be_served_is_refused_by_its_field(field, value, expected):
    config = domino_config(dflash_config={field: value})
    place = field if value is None else f"dflash_config.{field}"
    with pytest.raises(DraftConfigError, match=f"draft config {place}={value}: expected {expected}"):
        DraftSpec.from_config(config)
