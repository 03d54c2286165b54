"""Malformed drafts of each format end start-up with the field, its value, what was expected and what to change.

Those of a draft's own modules: `test_own_module_validation`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.checkpoint.families import foreign
from dflash_sglang.checkpoint.left_out import Flags
from tests.support.draft_formats import FORMATS, speculators_config
from tests.support.fakes import BuiltInWorker, arguments
from tests.support.start_up import change, launch, refusal, refused
from tests.support.tiny import draft_config, make_pair

SPECULATORS = "speculators with its own head and embedding"
SINKS = "z-lab with attention sinks and a value scale"
SCALED = "z-lab with scaled embeddings and scaled, capped logits"

ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no layer ids": (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": None},
        {},
        "draft config aux_hidden_state_layer_ids=None: expected the layers of the target that the draft was "
        "trained on, in the order of fc's columns. Add aux_hidden_state_layer_ids (",
    ),
    "ids that are not shifted, one of them 0": (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": [0, 3, 4]},
        {},
        "draft config aux_hidden_state_layer_ids=[0, 3, 4]: expected a non-empty list of integers >= 1",
    ),
    "ids beyond the target": (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": [2, 4, 6]},
        {},
        "draft config aux_hidden_state_layer_ids=[2, 4, 6]: expected layers of the target, 1 to 5 (its last "
        "layer). Correct aux_hidden_state_layer_ids, or serve its target.",
    ),
    "features of other layers": (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": [2, 4]},
        {},
        "draft tensor fc.weight=[64, 192]: expected [64, 128]: [hidden_size, 2 target layers x hidden_size]. "
        "Make aux_hidden_state_layer_ids name the layers",
    ),
    "features of another width": (
        SPECULATORS,
        {"target_hidden_size": 128},
        {},
        "draft config target_hidden_size=128: expected null or the draft's hidden_size of 64.",
    ),
    "a decoder without its width": (
        SPECULATORS,
        {"transformer_layer_config": {"hidden_size": None}},
        {},
        "draft config hidden_size=None: expected the field to be present.",
    ),
    "no mask token": (
        SPECULATORS,
        {"mask_token_id": None},
        {},
        "draft config mask_token_id=None: expected the id that stands for a position to be proposed. "
        "Add mask_token_id",
    ),
    "a negative cap": (
        SCALED,
        {"dflash_config": {"final_logit_softcapping": -30.0}},
        {},
        "draft config dflash_config.final_logit_softcapping=-30.0: expected a positive number.",
    ),
    "no factor on the logits": (
        SCALED,
        {"dflash_config": {"output_multiplier": 0}},
        {},
        "draft config dflash_config.output_multiplier=0: expected a positive number.",
    ),
    "a malformed scale of the embeddings": (
        SCALED,
        {"dflash_config": {"input_embedding_scale": "2"}},
        {},
        "draft config dflash_config.input_embedding_scale='2': expected a positive number.",
    ),
    "sinks that are neither there nor not": (
        SINKS,
        {"dflash_config": {"attention_sink_bias": 1}},
        {},
        "draft config dflash_config.attention_sink_bias=1: expected true or false.",
    ),
}


@refused("a malformed field or tensor")
@pytest.mark.parametrize(("name", "config", "tensors", "message"), ROWS.values(), ids=ROWS.keys())
def test_a_malformed_field_ends_start_up_and_is_named(
    tmp_path: Path, name: str, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    problem = refusal(change(FORMATS[name](tmp_path), config, tensors))
    assert problem.startswith(message)


@pytest.mark.parametrize("name", FORMATS)
def test_each_well_formed_format_is_ours(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_sglang.worker import DFlashWorker

    assert launch(FORMATS[name](tmp_path), speculative_draft_attention_backend=None) is DFlashWorker


@refused(
    "attention sinks on flashinfer or trtllm_mha",
    "--speculative-draft-attention-backend='flashinfer': expected a backend for the draft's attention sinks",
)
@pytest.mark.parametrize(
    ("backend", "is_refused"),
    [("fa3", False), ("fa4", False), ("triton", False), ("flashinfer", True), ("trtllm_mha", True)],
)
def test_sinks_need_a_backend_whose_kernels_take_them(tmp_path: Path, backend: str, is_refused: bool) -> None:
    directory = FORMATS[SINKS](tmp_path)
    change(directory, {"layer_types": ["sliding_attention"] * 2}, {})
    if not is_refused:
        launch(directory, device="cuda", speculative_draft_attention_backend=backend)
        return
    problem = refusal(directory, device="cuda", speculative_draft_attention_backend=backend)
    assert problem == (
        f"--speculative-draft-attention-backend={backend!r}: expected a backend for the draft's attention sinks "
        "(attention_sink_bias): fa3, fa4, triton. Set --speculative-draft-attention-backend to one of these."
    )


@refused(
    "without a block in config.json or flags", "draft config block_size=None: expected the trained block length."
)
def test_a_flag_gives_the_block_to_server_doctor_and_commands_alike(tmp_path: Path) -> None:
    from dflash_sglang.bench.checkpoints import facts
    from dflash_sglang.bench.settings import BadSetting
    from dflash_sglang.doctor import findings
    from dflash_sglang.worker import DFlashWorker

    target, draft = make_pair(tmp_path, draft={"block_size": None})
    said = "draft config block_size=None: expected the trained block length. Set --speculative-dflash-block-size "
    assert refusal(draft).startswith(said)
    with pytest.raises(BadSetting, match=said.replace(".", r"\.")):
        facts(str(target), str(draft))
    for flag in ("speculative_dflash_block_size", "speculative_num_draft_tokens"):
        assert launch(draft, **{flag: 6}) is DFlashWorker
        words = [f"--{flag.replace('_', '-')}", "6"]
        assert facts(str(target), str(draft), flags=Flags.of_words(words)).spec.block_size == 6
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(findings, "resolving_view", lambda args: args)
            read = findings._read(arguments(draft, **{flag: 6}))
        assert read is not None and read[0].block_size == 6


# ---- What no worker reads -------------------------------------------------------------------------------------


@refused("speculators: Domino, another algorithm, or launches of the built-in worker")
@pytest.mark.parametrize(
    ("config", "flags", "field"),
    [
        ({"speculators_model_type": "domino"}, {}, "draft config speculators_model_type='domino'"),
        ({"speculators_model_type": "dspark"}, {}, "draft config architectures='DFlashDraftModel'"),
        ({"projector_type": "domino"}, {}, "draft config projector_type='domino'"),
        ({"architectures": ["DSparkDraftModel"]}, {}, "draft config architectures='DSparkDraftModel'"),
        ({"architectures": ["DFlash2DraftModel"]}, {}, "draft config architectures='DFlash2DraftModel'"),
        ({"speculators_model_type": "dflash2"}, {}, "draft config architectures='DFlashDraftModel'"),
        ({}, {"device": "npu"}, "--device='npu'"),
    ],
    ids=str,
)
def test_a_speculators_draft_that_is_not_ours_is_refused_as_the_built_in_worker_cannot_read_it(
    tmp_path: Path, config: dict[str, Any], flags: dict[str, Any], field: str
) -> None:
    problem = refusal(change(FORMATS[SPECULATORS](tmp_path), config, {}), **flags)
    assert problem.startswith(
        f"{field}: expected a launch of dflash_sglang, which alone reads the speculators format"
    )
    assert problem.endswith("Change it, or serve the draft in z-lab's format.")


def test_a_zlab_draft_that_is_not_ours_still_goes_to_the_built_in_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = make_pair(tmp_path, draft={"dflash_config": {"projector_type": "eagle"}})[1]
    with caplog.at_level(logging.WARNING, logger="dflash_sglang"):
        assert launch(draft) is BuiltInWorker
    assert "projector_type='eagle': a head that corrects the proposals" in caplog.text


@refused("whose anchor's row proposes, in a launch of the built-in worker", "--device='npu': expected a launch")
@pytest.mark.parametrize(
    ("fields", "flags", "message"),
    [
        ({"sample_from_anchor": True}, {}, None),
        ({"dflash_config": {"query_zero_predicts_next": True}}, {}, None),
        ({"sample_from_anchor": False}, {"device": "npu"}, None),
        (
            {"dflash_config": {"query_zero_predicts_next": True}},
            {"device": "npu"},
            "--device='npu': expected a launch of dflash_sglang, which alone reads draft config "
            "dflash_config.query_zero_predicts_next=True (not so: ",
        ),
        (
            {"sample_from_anchor": "false"},
            {"device": "npu"},
            "draft config sample_from_anchor='false': expected true or false.",
        ),
    ],
    ids=str,
)
def test_the_built_in_worker_which_passes_over_the_anchors_row_gets_no_draft_that_needs_it(
    tmp_path: Path, fields: dict[str, Any], flags: dict[str, Any], message: str | None
) -> None:
    from dflash_sglang.worker import DFlashWorker

    draft = make_pair(tmp_path, draft=fields)[1]
    if message is None:
        assert launch(draft, **flags) is (BuiltInWorker if flags else DFlashWorker)
    else:
        assert refusal(draft, **flags).startswith(message)


def test_the_older_name_of_the_architecture_is_plain_in_the_speculators_format_alone() -> None:
    assert foreign(speculators_config(draft_config(), architectures=["DFlashSpeculator"])) is None
    assert foreign(draft_config(architectures=["DFlashSpeculator"])) is not None
