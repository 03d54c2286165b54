"""Drafts of each format and their own modules: what is wrong with them ends start-up by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.checkpoint.files import tensor_facts, weights_directory
from dflash_sglang.checkpoint.left_out import Flags
from dflash_sglang.checkpoint.own_modules import own_modules
from tests.support.draft_formats import FORMATS, KEPT, matrix
from tests.support.fakes import BuiltInWorker, arguments
from tests.support.start_up import change, launch, refusal, refused, tells
from tests.support.tiny import make_pair

SPECULATORS = "speculators with its own head and embedding"
REDUCED = "speculators with a reduced vocabulary"
OWN_EMBEDDING = "z-lab with its own embedding, the mask beyond the target's vocabulary"
OWN_HEAD = "z-lab with its own head"
MASK_FILE = "z-lab with mask_embedding.pt"
MASK_TENSOR = "z-lab with a mask_embedding tensor"
SINKS = "z-lab with attention sinks and a value scale"
absolute = torch.tensor(KEPT)
SMALL = {"vocab_size": 256, "dflash_config": {"mask_token_id": 3}}
OTHER, TRAINED = "Serve the target that the draft was trained for.", "Use the one that was trained with this draft"

# a format, fields of its config.json, its tensors (None removes) -> what ends start-up
ROWS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (SPECULATORS, {"aux_hidden_state_layer_ids": [2, 4, 6]}, {}, "draft config aux_hidden_state_layer_ids=[2, 4, "
     "6]: expected layers of the target, 1 to 5 (its last layer). Correct aux_hidden_state_layer_ids, or serve"),
    (SPECULATORS, {"aux_hidden_state_layer_ids": [2, 4]}, {}, "draft tensor fc.weight=[64, 192]: expected [64, "
     "128]: [hidden_size, 2 target layers x hidden_size]. Make aux_hidden_state_layer_ids name the layers"),
    (OWN_EMBEDDING, {"dflash_config": {"mask_token_id": 384}}, {}, f"draft config mask_token_id=384: expected an "
     f"id below the draft's own vocab_size of 384. Correct dflash_config.mask_token_id, or "
     f"{OTHER[0].lower()}{OTHER[1:]}"),
    (OWN_EMBEDDING, SMALL, {"embed_tokens.weight": matrix(256, 64, 1)}, f"draft config vocab_size=256: expected "
     f"at least the target's vocab_size of 320 (any of its tokens is embedded). {OTHER}"),
    (SPECULATORS, {}, {"embed_tokens.weight": matrix(300, 64, 1)}, "draft tensor embed_tokens.weight=[300, 64]: "
     "expected [320, 64]: [vocab_size, hidden_size]. Make vocab_size and the tensor agree."),
    (OWN_HEAD, {}, {"lm_head.weight": None}, "draft config has_lm_head=True: expected a tensor lm_head.weight in "
     "the checkpoint. Use a complete checkpoint, or set has_lm_head to false to take the target's."),
    (OWN_EMBEDDING, {**SMALL, "vocab_size": 320}, {"embed_tokens.weight": None},
     "draft config has_embed_tokens=True: expected a tensor embed_tokens.weight in the checkpoint."),
    (OWN_HEAD, {"has_lm_head": False}, {}, "draft config has_lm_head=False: expected no tensor lm_head.weight in "
     "the checkpoint, which would be used in place of the target's. Set has_lm_head to true, or remove the"),
    (REDUCED, {}, {"lm_head.weight": None, "d2t": None, "t2d": None}, "draft config draft_vocab_size=46: "
     "expected the target's vocab_size of 320 in a checkpoint without lm_head.weight. Use the checkpoint with"),
    (REDUCED, {"draft_vocab_size": 320}, {"lm_head.weight": None}, "draft tensor d2t=[46]: expected a head of "
     "the draft's own (lm_head.weight), whose rows it maps to the target's ids. Use the checkpoint with the"),
    (REDUCED, {}, {"d2t": None, "t2d": None}, "draft tensor d2t=None: expected the offset to the target's id for "
     "each of the 46 rows of the head (the target's vocab_size is 320). Use a checkpoint that holds d2t, or"),
    (REDUCED, {}, {"lm_head.weight": matrix(320, 64, 1)}, "draft tensor lm_head.weight=[320, 64]: expected [46, "
     "64]: [draft_vocab_size, hidden_size]. Make draft_vocab_size and the tensor agree."),
    (REDUCED, {}, {"d2t": torch.zeros(45, dtype=torch.int64)}, "draft tensor d2t='[45] torch.int64': expected "
     "[46] integers: one offset for each row of the head. Make draft_vocab_size and d2t agree."),
    (REDUCED, {}, {"d2t": absolute}, "draft tensor d2t='rows to ids 0 to 360, 46 of them different': expected "
     "offsets: row + d2t[row] is one id of the target each, 0 to 319. Write target id - row into d2t, not the"),
    (REDUCED, {}, {"t2d": torch.zeros(320, dtype=torch.bool).index_fill(0, absolute + 1, True)},
     'draft tensor d2t="unlike t2d at the target\'s id 0": expected the ids row + d2t[row] to be those that t2d '
     'marks. Write target'),
    (REDUCED, {}, {"t2d": torch.zeros(300, dtype=torch.bool)}, f"draft tensor t2d=[300]: expected [320]: one "
     f"flag for each id of the target. {OTHER}"),
    (REDUCED, {"draft_vocab_size": 8},
     {"lm_head.weight": matrix(8, 64, 1), "d2t": torch.zeros(8, dtype=torch.int64), "t2d": torch.arange(320) < 8},
     "draft config draft_vocab_size=8: expected at least 16 rows of the head, from which proposals are drawn. "
     "Serve a draft with a larger vocabulary."),
    (MASK_TENSOR, {}, {"mask_embedding": torch.zeros(65)}, f"draft tensor mask_embedding=[65]: expected [64]: "
     f"one row of hidden_size. {TRAINED}."),
    # rows of a head beyond the target's vocabulary are padding
    (OWN_HEAD, {"draft_vocab_size": 300}, {"lm_head.weight": matrix(384, 64, 1)},
     "draft tensor d2t=None: expected the offset to the target's id for each of the 300 rows of the head"),
    (OWN_HEAD, {"draft_vocab_size": 384}, {"lm_head.weight": matrix(383, 64, 1)},
     "draft tensor lm_head.weight=[383, 64]: expected [384, 64]: [draft_vocab_size, hidden_size]."),
]  # fmt: skip


@refused("a malformed field, tensor or module of its own")
def test_what_is_malformed_ends_start_up_and_is_named(tmp_path: Path) -> None:
    failures = []
    for i, (name, config, tensors, says) in enumerate(ROWS):
        said = refusal(change(FORMATS[name](tmp_path / str(i)), config, tensors))
        failures += [] if tells(said, says) else [(says, said)]
    assert failures == []


def test_each_well_formed_format_is_ours(tmp_path: Path) -> None:
    from dflash_sglang.worker import DFlashWorker

    for i, make in enumerate(FORMATS.values()):
        assert launch(make(tmp_path / str(i)), speculative_draft_attention_backend=None) is DFlashWorker
    for fields, rows in (({"draft_vocab_size": 384}, 384), ({}, 384), ({"draft_vocab_size": 320}, 321)):  # padding
        draft = FORMATS[OWN_HEAD](tmp_path / f"{rows} {fields}")
        assert launch(change(draft, fields, {"lm_head.weight": matrix(rows, 64, 1)})) is DFlashWorker


@refused("a module of its own in files of another format")
def test_modules_of_the_drafts_own_are_asked_for_in_safetensors(tmp_path: Path) -> None:
    for name, config, says in (
        (OWN_HEAD, {}, "has_lm_head=True"),
        (OWN_HEAD, {"has_lm_head": None, "has_embed_tokens": True}, "has_embed_tokens=True"),
        (REDUCED, {}, "draft_vocab_size=46"),
    ):
        draft = change(FORMATS[name](tmp_path / says), config, {})
        (draft / "model.safetensors").unlink()
        (draft / "pytorch_model.bin").touch()
        files = "expected a checkpoint of *.safetensors files, where modules of the draft's own are looked for."
        assert refusal(draft) == f"draft config {says}: {files} Convert the checkpoint to safetensors."


ONE_ROW = (
    "expected one embedding row for every mask token, saved as a tensor or as {'embedding': tensor}. Save it again"
)
MASK_FILES: list[tuple[Any, str]] = [
    ({"embedding": torch.zeros(64), "mask_token_id": 4}, f"draft file mask_embedding.pt mask_token_id=4: "
     f"expected the config's mask_token_id of 3. {TRAINED}, or correct the config."),
    ({"embedding": torch.zeros(65), "mask_token_id": 3}, f"draft file mask_embedding.pt=[65]: expected [64]: one "
     f"row of hidden_size. {TRAINED}."),
    ({"embedding": torch.zeros(7, 64), "mask_token_id": 3, "per_position": True},
     f"draft config mask_embedding.pt='one row per position of the block': {ONE_ROW}"),
    ({"mask_token_id": 3}, f"draft config mask_embedding.pt=\"dict with ['mask_token_id']\": {ONE_ROW}"),
    ({"embedding": torch.zeros(64), "mask_token_id": [3]}, "draft config mask_embedding.pt mask_token_id=[3]: "
     "expected the id of the mask token, an integer. Save it again with the id that the draft was trained with."),
    ("text", f"draft config mask_embedding.pt='a file of another kind ( ... {ONE_ROW}"),
]  # fmt: skip


@refused("a malformed mask_embedding.pt")
def test_a_mask_embedding_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    for i, (saved, says) in enumerate(MASK_FILES):
        directory = FORMATS[MASK_FILE](tmp_path / str(i))
        path = directory / "mask_embedding.pt"
        path.write_text(saved) if isinstance(saved, str) else torch.save(saved, path)
        assert tells(said := refusal(directory), says), said


def test_a_hub_repositorys_modules_are_read_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, commit = tmp_path / "models--acme--draft", "0" * 40
    FORMATS[MASK_FILE](repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    directory = weights_directory("acme/draft", None, None)
    assert directory == repository / "snapshots" / commit
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "other"))
    assert weights_directory("acme/draft", None, str(tmp_path)) == directory
    mask = own_modules(directory, tensor_facts(directory)).mask_embedding
    assert mask is not None and mask.row.shape == (64,)


@refused("attention sinks on flashinfer or trtllm_mha")
def test_sinks_need_a_backend_whose_kernels_take_them(tmp_path: Path) -> None:
    flag = "--speculative-draft-attention-backend"
    directory = change(FORMATS[SINKS](tmp_path), {"layer_types": ["sliding_attention"] * 2}, {})
    for backend in ("fa3", "fa4", "triton"):
        launch(directory, device="cuda", speculative_draft_attention_backend=backend)
    for backend in ("flashinfer", "trtllm_mha"):
        assert refusal(directory, device="cuda", speculative_draft_attention_backend=backend) == (
            f"{flag}={backend!r}: expected a backend for the draft's attention sinks (attention_sink_bias): fa3, "
            f"fa4, triton. Set {flag} to one of these."
        )


@refused("without a block in config.json or flags")
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

NOT_OURS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"speculators_model_type": "domino"}, {}, "draft config speculators_model_type='domino'"),
    ({"speculators_model_type": "dspark"}, {}, "draft config architectures='DFlashDraftModel'"),
    ({"architectures": ["DFlash2DraftModel"]}, {}, "draft config architectures='DFlash2DraftModel'"),
    ({}, {"device": "npu"}, "--device='npu'"),
]  # fmt: skip


@refused("speculators: Domino, another algorithm, or launches of the built-in worker")
def test_a_speculators_draft_that_is_not_ours_is_refused_as_the_built_in_worker_cannot_read_it(
    tmp_path: Path,
) -> None:
    for i, (config, flags, field) in enumerate(NOT_OURS):
        said = refusal(change(FORMATS[SPECULATORS](tmp_path / str(i)), config, {}), **flags)
        alone = "expected a launch of dflash_sglang, which alone reads the speculators format (not so: "
        assert tells(said, f"{field}: {alone} ... Change it, or serve the draft in z-lab's format."), said


@refused("whose anchor's row proposes, in a launch of the built-in worker", "--device='npu': expected a launch")
def test_the_built_in_worker_which_passes_over_the_anchors_row_gets_no_draft_that_needs_it(tmp_path: Path) -> None:
    from dflash_sglang.worker import DFlashWorker

    drafts = (
        {"sample_from_anchor": True},
        {"dflash_config": {"query_zero_predicts_next": True}},
        {"sample_from_anchor": False},
        {"sample_from_anchor": "false"},
    )
    said, nested, unsaid, malformed = (make_pair(tmp_path / str(i), draft=one)[1] for i, one in enumerate(drafts))
    assert launch(said) is launch(nested) is DFlashWorker
    assert launch(unsaid, device="npu") is BuiltInWorker
    assert tells(
        refusal(nested, device="npu"),
        "--device='npu': expected a launch of dflash_sglang, which alone reads draft config "
        "dflash_config.query_zero_predicts_next=True (not so:  ... Change it, or serve another draft.",
    )
    expected = "draft config sample_from_anchor='false': expected true or false."
    assert refusal(malformed, device="npu").startswith(expected)
