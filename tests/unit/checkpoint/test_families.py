"""Drafts that no worker of SGLang serves end start-up by name, before any model is loaded."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from dflash_sglang.checkpoint import families
from dflash_sglang.checkpoint.families import FOREIGN_ARCHITECTURES, check_family, family_of, foreign
from dflash_sglang.checkpoint.speculators import ALGORITHM, DECODER
from tests.support.draft_formats import speculators_config, speculators_dflash2
from tests.support.reference_dflash2 import dflash2_config
from tests.support.start_up import change as changed
from tests.support.start_up import refusal, refused
from tests.support.tiny import draft_config, make_pair

MODULES = ("dflash", "dspark", "dspark_minimax", "lfm2_dspark", "lilicorr")  # of SGLang, with draft models
NAMES: tuple[object, ...] = (
    ["Gemma4Eagle3Model"], ["DFlashDraftModle"], ["DFlashSpeculator"], None, [["DFlashDraftModel"]],
    "DFlashDraftModel", ["Qwen3ForCausalLM", "DFlashDraftModel"],
    ["MiMoV2FlashForCausalLM"],  # a target's multi-token-prediction layers, of another target than Step-3.5
)  # fmt: skip
ATTENTION: tuple[tuple[dict[str, Any], str], ...] = (
    ({"dflash_config": {"attention_mode": "mla"}}, "dflash_config.attention_mode='mla'"),
    ({"attention_mode": "mla"}, "attention_mode='mla'"),
    ({"attention_mode": "linear"}, "attention_mode='linear'"),
    # of a family that the built-in worker serves
    ({"architectures": ["Qwen3DSparkModel"], "attention_mode": "mla"}, "attention_mode='mla'"),
)


def test_a_family_is_told_by_architecture_and_projector_or_by_the_algorithm_of_the_format() -> None:
    for fields, family in (
        ({}, families.PLAIN),
        ({"architectures": ["MiniMaxDFlash2DraftModel", "DFlashDraftModel"]}, families.DFLASH2),
        ({"architectures": None}, families.PLAIN),
        ({"projector_type": "domino"}, families.DOMINO),
        ({"projector_type": "domino", "dflash_config": {"projector_type": ""}}, families.PLAIN),
        ({"projector_type": "domino", "architectures": ["DFlash2DraftModel"]}, families.DFLASH2),
        ({DECODER: {}, ALGORITHM: "dspark"}, families.DSPARK),
        ({DECODER: {}, ALGORITHM: None, "projector_type": "domino"}, families.PLAIN),
    ):
        assert family_of(draft_config(**fields)) is family, fields


@refused("of an architecture that is no DFLASH draft of SGLang")
@refused("its target's multi-token-prediction layers, of another target than Step-3.5")
@refused("with MLA layers")
def test_a_draft_that_no_worker_serves_is_refused_by_name(tmp_path: Path) -> None:
    draft = make_pair(tmp_path)[1]
    for names in NAMES:
        said = refusal(changed(draft, {"architectures": names}, {}))
        assert said.startswith(
            f"draft config architectures={names!r}: expected a DFLASH draft: DFlash2BeamDraftModel"
        )
    for i, (fields, says) in enumerate(ATTENTION):
        draft = changed(make_pair(tmp_path / str(i))[1], fields, {})
        modes = "none, or one of mha, gqa, mqa: no worker has other attention for drafts"
        fix = "Serve a draft trained with grouped-query attention."
        assert refusal(draft) == f"draft config {says}: expected {modes}. {fix}"
    config = dflash2_config(dflash_config={"attention_mode": "mla"})
    for device in ("cpu", "cuda"):
        draft = changed(make_pair(tmp_path / device)[1], config, {})
        assert "attention_mode='mla'" in refusal(draft, device=device)


def test_every_family_of_the_table_passes_and_is_a_model_of_sglang() -> None:
    modules = [importlib.import_module(f"sglang.srt.models.{name}") for name in MODULES]
    entries = [module.EntryClass for module in modules]
    models = {model.__name__ for entry in entries for model in (entry if isinstance(entry, list) else [entry])}
    served = [*FOREIGN_ARCHITECTURES, "DFlashDraftModel", "DFlash2DraftModel"]
    assert set(served) <= models
    for name in served:
        check_family(draft_config(architectures=[name]))
        check_family(draft_config(architectures=[name], dflash_config={"attention_mode": "gqa"}))


def test_every_name_of_dflash2_is_ours_and_registered_and_other_families_in_its_layout_are_not() -> None:
    from dflash_sglang.models import dflash2

    for name in ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"):
        config = dflash2_config(architectures=[name], dflash_config={"output_multiplier": 0.5})
        assert foreign(config) is None and family_of(config) is families.DFLASH2
        assert name in [model.__name__ for model in dflash2.EntryClass]
    assert foreign(dflash2_config(speculators_model_type="dflash2")) is not None
    exported = speculators_dflash2(dflash2_config())
    assert foreign(exported) is None
    for change in ({"speculators_model_type": "dflash"}, {"architectures": ["DFlashDraftModel"]}):
        assert foreign({**exported, **change}) is not None
    assert (
        foreign(speculators_config(draft_config(), architectures=["DFlashSpeculator"])) is None
    )  # its older name
