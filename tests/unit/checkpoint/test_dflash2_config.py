"""DFlash2 checkpoints' config.json: what is read, what is refused, and whose they are."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_sglang.checkpoint import DraftConfigError, DraftSpec
from dflash_sglang.checkpoint.families import foreign
from dflash_sglang.settings.plugin_config import PluginConfig
from tests.support.draft_formats import speculators_config
from tests.support.reference_dflash2 import dflash2_config
from tests.support.tiny import draft_config

refused = pytest.mark.matrix(target="Qwen3", draft="DFlash2", kv="model dtype", outcome="refused")


def shapes(spec: DraftSpec) -> tuple[float, float | None, float]:
    vocabulary = spec.vocabulary
    return vocabulary.logit_multiplier, vocabulary.logit_softcap, vocabulary.embedding_scale


def test_the_published_layout_is_read():
    spec = DraftSpec.from_config(dflash2_config())
    assert spec.block_size == 8 and [layer.causal for layer in spec.layers] == [False, False]
    assert (spec.convolution.taps, spec.convolution.group_size) == (2, 16)
    assert (spec.dflash2.selector_rank, spec.dflash2.selector_top_k) == (12, 5)
    assert shapes(spec) == (1, None, 1)
    scaled = {"output_multiplier": 2, "final_logit_softcapping": 30.0, "input_embedding_scale": 8.0}
    spec = DraftSpec.from_config(dflash2_config(final_logit_softcapping=15.0, dflash_config=scaled))
    assert shapes(spec) == (2, 30, 8)
    assert DraftSpec.from_config(draft_config()).dflash2 is None


@pytest.mark.parametrize("name", ["DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"])
def test_every_name_of_the_architecture_is_ours_and_registered(name):
    from dflash_sglang.models import dflash2

    config = dflash2_config(architectures=[name], dflash_config={"output_multiplier": 0.5})
    assert foreign(config) is None
    assert DraftSpec.from_config(config).dflash2 is not None
    assert name in [model.__name__ for model in dflash2.EntryClass]


def test_other_families_in_dflash2s_layout_stay_with_the_built_in_worker():
    assert foreign(dflash2_config(speculators_model_type="dflash2")) is not None
    assert foreign(speculators_config(draft_config(), architectures=["DFlash2DraftModel"])) is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "conv_kernel_size alone": (
        {"conv_group_size": None},
        r"dflash_config.conv_group_size=None: expected its value beside dflash_config.conv_kernel_size=2: "
        r"a convolution has both. Add dflash_config.conv_group_size \(the one it was trained with\)",
    ),
    "conv_group_size alone": (
        {"conv_kernel_size": 0},
        r"dflash_config.conv_kernel_size=0: expected its value beside dflash_config.conv_group_size=16",
    ),
    "groups that do not divide the hidden size": (
        {"conv_group_size": 24},
        "dflash_config.conv_group_size=24: expected a divisor of hidden_size=64. Correct dflash_config.conv_group",
    ),
    "a fractional tap": (
        {"conv_kernel_size": 1.5},
        "dflash_config.conv_kernel_size=1.5: expected an integer >= 1",
    ),
    "more taps than the kernel unrolls": (
        {"conv_kernel_size": 17},
        "dflash_config.conv_kernel_size=17: expected at most 16 taps. Correct dflash_config.conv_kernel_size",
    ),
    "a rank without candidates": (
        {"selector_top_k": None},
        "selector_top_k=None: expected the field to be present .*Add dflash_config.selector_top_k",
    ),
    "candidates without a rank": (
        {"selector_rank": None},
        "selector_rank=None: expected the field to be present .*Add dflash_config.selector_rank",
    ),
    "more candidates than the kernel holds": (
        {"selector_top_k": 33},
        "dflash_config.selector_top_k=33: expected at most 32 candidates per position. Correct",
    ),
    "a vocabulary of its own": (
        {"draft_vocab_size": 9},
        "draft_vocab_size=9: expected none, or vocab_size=320: the selector's codebooks hold every token",
    ),
    "a negative multiplier": ({"output_multiplier": -1}, "output_multiplier=-1: expected a positive number"),
    "a negative soft cap": ({"final_logit_softcapping": -30.0}, "softcapping=-30.0: expected a positive number"),
    "an infinite scale": (
        {"input_embedding_scale": float("inf")},
        "dflash_config.input_embedding_scale=inf: expected a positive number",
    ),
}


@refused
@pytest.mark.parametrize(("nested", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_that_cannot_be_served_is_refused_with_the_field_its_value_and_what_to_change(nested, message):
    with pytest.raises(DraftConfigError, match=message) as error:
        DraftSpec.from_config(dflash2_config(dflash_config=nested))
    assert str(error.value).startswith("draft config ") and "config.json" in str(error.value)


@refused
def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(DraftConfigError, match="selector_top_k=5: expected at most 3 candidates"):
        DraftSpec.from_config(dflash2_config(vocab_size=3))


@pytest.mark.parametrize(
    ("setting", "plain", "selector"),
    [("auto", False, True), ("argmax", False, False), ("drawn", True, True)],
)
def test_proposals_are_drawn_by_default_where_the_draft_has_a_joint_distribution(setting, plain, selector):
    config = PluginConfig.from_mapping({"proposals": setting})
    assert (config.draws(joint=False), config.draws(joint=True)) == (plain, selector)
    assert PluginConfig().proposals == "auto"
