"""Drafts that no worker of SGLang serves end start-up by name, before any model is loaded."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.checkpoint import families
from dflash_sglang.checkpoint.families import FOREIGN_ARCHITECTURES, check_family, family_of
from dflash_sglang.checkpoint.speculators import ALGORITHM, DECODER
from tests.support.start_up import change, refusal, refused
from tests.support.tiny import draft_config, make_pair
from tests.unit.checkpoint.test_dflash2_config import dflash2_config

MODULES = ("dflash", "dspark", "dspark_minimax", "lfm2_dspark", "lilicorr")  # of SGLang, with draft models
OF_A_TARGET = "its target's multi-token-prediction layers, of another target than Step-3.5"
UNKNOWN = "of an architecture that is no DFLASH draft of SGLang"
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Gemma4Eagle3Model"]}, "draft config architectures=['Gemma4Eagle3Model']: expected"),
    (
        {"architectures": ["Qwen3VLForConditionalGeneration"]},
        "architectures=['Qwen3VLForConditionalGeneration']: ",
    ),
    ({"architectures": ["LlamaForCausalLM"]}, "draft config architectures=['LlamaForCausalLM']: expected"),
    ({"architectures": ["DFlashDraftModle"]}, "draft config architectures=['DFlashDraftModle']: expected"),
    ({"architectures": ["DFlashSpeculator"]}, "draft config architectures=['DFlashSpeculator']: expected"),
    (
        {"architectures": None},
        "draft config architectures=None: expected a DFLASH draft: DFlash2BeamDraftModel, DF",
    ),
    ({"architectures": [["DFlashDraftModel"]]}, "draft config architectures=[['DFlashDraftModel']]: expected"),
    ({"architectures": "DFlashDraftModel"}, "draft config architectures='DFlashDraftModel': expected"),
]
MIMO = "MiMoV2FlashForCausalLM"
REFUSED_MIMO = f"draft config architectures=[{MIMO!r}]: expected a DFLASH draft"
MLA = [
    ({"dflash_config": {"attention_mode": "mla"}}, "draft config dflash_config.attention_mode='mla': expected "),
    ({"attention_mode": "mla"}, "draft config attention_mode='mla': expected none, or one of mha, gqa, mqa"),
    ({"attention_mode": "linear"}, "draft config attention_mode='linear': expected none, or one of mha, gqa, mqa"),
    # of a family that the built-in worker serves
    (
        {"architectures": ["Qwen3DSparkModel"], "dflash_config": {"attention_mode": "mla"}},
        "draft config dflash_config.attention_mode='mla': expected ",
    ),
]


@pytest.mark.parametrize(("fields", "family"), [
    ({}, families.PLAIN),
    ({"architectures": ["MiniMaxDFlash2DraftModel", "DFlashDraftModel"]}, families.DFLASH2),
    ({"architectures": None}, families.PLAIN),
    ({"projector_type": "domino"}, families.DOMINO),
    ({"projector_type": "domino", "dflash_config": {"projector_type": ""}}, families.PLAIN),
    ({"projector_type": "domino", "architectures": ["DFlash2DraftModel"]}, families.DFLASH2),
    ({DECODER: {}, ALGORITHM: "dspark"}, families.DSPARK),
    ({DECODER: {}, ALGORITHM: None, "projector_type": "domino"}, families.PLAIN),
], ids=str)  # fmt: skip
def test_a_family_is_told_by_architecture_and_projector_or_by_the_algorithm_of_the_format(
    fields: dict, family: families.Family
) -> None:
    assert family_of(draft_config(**fields)) is family


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(pytest.param(*row, marks=refused(UNKNOWN, row[1])) for row in ROWS),
        pytest.param({"architectures": [MIMO]}, REFUSED_MIMO, marks=refused(OF_A_TARGET, REFUSED_MIMO)),
        *(pytest.param(*row, marks=refused("with MLA layers", row[1])) for row in MLA),
    ],
    ids=str,
)
def test_a_draft_that_no_worker_serves_is_refused_by_name(tmp_path: Path, fields: dict, message: str) -> None:
    assert message in refusal(change(make_pair(tmp_path)[1], fields, {}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_mla_layers_are_refused_in_a_dflash2_draft_too(tmp_path: Path, device: str) -> None:
    draft = change(make_pair(tmp_path)[1], dflash2_config(dflash_config={"attention_mode": "mla"}), {})
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
