"""A draft's own embedding, head, vocabulary and mask row: what is wrong with them ends start-up by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.checkpoint.files import tensor_facts, weights_directory
from dflash_sglang.checkpoint.own_modules import own_modules
from tests.support.draft_formats import FORMATS, KEPT, matrix
from tests.support.start_up import change, launch, refusal, refused

SPECULATORS = "speculators with its own head and embedding"
REDUCED = "speculators with a reduced vocabulary"
OWN_EMBEDDING = "z-lab with its own embedding, the mask beyond the target's vocabulary"
OWN_HEAD = "z-lab with its own head"
MASK_FILE = "z-lab with mask_embedding.pt"
MASK_TENSOR = "z-lab with a mask_embedding tensor"
absolute = torch.tensor(KEPT)

ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a mask token outside of the draft's own table": (
        OWN_EMBEDDING,
        {"dflash_config": {"mask_token_id": 384}},
        {},
        "draft config mask_token_id=384: expected an id below the draft's own vocab_size of 384.",
    ),
    "an own table with fewer tokens than the target": (
        OWN_EMBEDDING,
        {"vocab_size": 256, "dflash_config": {"mask_token_id": 3}},
        {"embed_tokens.weight": matrix(256, 64, 1)},
        "draft config vocab_size=256: expected at least the target's vocab_size of 320",
    ),
    "an own table of another shape": (
        SPECULATORS,
        {},
        {"embed_tokens.weight": matrix(300, 64, 1)},
        "draft tensor embed_tokens.weight=[300, 64]: expected [320, 64]: [vocab_size, hidden_size].",
    ),
    "no head though the config has one": (
        OWN_HEAD,
        {},
        {"lm_head.weight": None},
        "draft config has_lm_head=True: expected a tensor lm_head.weight in the checkpoint. "
        "Use a complete checkpoint, or set has_lm_head to false to take the target's.",
    ),
    "no embedding though the config has one": (
        OWN_EMBEDDING,
        {"vocab_size": 320, "dflash_config": {"mask_token_id": 3}},
        {"embed_tokens.weight": None},
        "draft config has_embed_tokens=True: expected a tensor embed_tokens.weight in the checkpoint.",
    ),
    "a head though the config has none": (
        OWN_HEAD,
        {"has_lm_head": False},
        {},
        "draft config has_lm_head=False: expected no tensor lm_head.weight in the checkpoint",
    ),
    "a flag that is none": (
        OWN_HEAD,
        {"has_lm_head": "yes"},
        {},
        "draft config has_lm_head='yes': expected true or false.",
    ),
    "a reduced vocabulary without a head": (
        REDUCED,
        {},
        {"lm_head.weight": None, "d2t": None, "t2d": None},
        "draft config draft_vocab_size=46: expected the target's vocab_size of 320 in a checkpoint without "
        "lm_head.weight.",
    ),
    "a map without a head": (
        REDUCED,
        {"draft_vocab_size": 320},
        {"lm_head.weight": None},
        "draft tensor d2t=[46]: expected a head of the draft's own (lm_head.weight)",
    ),
    "a reduced vocabulary without a map": (
        REDUCED,
        {},
        {"d2t": None, "t2d": None},
        "draft tensor d2t=None: expected the offset to the target's id for each of the 46 rows of the head",
    ),
    "a head of another shape": (
        REDUCED,
        {},
        {"lm_head.weight": matrix(320, 64, 1)},
        "draft tensor lm_head.weight=[320, 64]: expected [46, 64]: [draft_vocab_size, hidden_size].",
    ),
    "a map of another length": (
        REDUCED,
        {},
        {"d2t": torch.zeros(45, dtype=torch.int64)},
        "draft tensor d2t='[45] torch.int64': expected [46] integers: one offset for each row of the head.",
    ),
    "a map of another type": (
        REDUCED,
        {},
        {"d2t": torch.zeros(46)},
        "draft tensor d2t='[46] torch.float32': expected [46] integers",
    ),
    "ids in place of offsets": (
        REDUCED,
        {},
        {"d2t": absolute},
        "draft tensor d2t='rows to ids 0 to 360, 46 of them different': expected offsets: row + d2t[row] is "
        "one id of the target each, 0 to 319. Write target id - row into d2t, not the target's id itself.",
    ),
    "a map that is not t2d's": (
        REDUCED,
        {},
        {"t2d": torch.zeros(320, dtype=torch.bool).index_fill(0, absolute + 1, True)},
        'draft tensor d2t="unlike t2d at the target\'s id 0": expected the ids row + d2t[row] to be those that',
    ),
    "flags of another vocabulary": (
        REDUCED,
        {},
        {"t2d": torch.zeros(300, dtype=torch.bool)},
        "draft tensor t2d=[300]: expected [320]: one flag for each id of the target.",
    ),
    "a vocabulary too small to draw from": (
        REDUCED,
        {"draft_vocab_size": 8},
        {
            "lm_head.weight": matrix(8, 64, 1),
            "d2t": torch.zeros(8, dtype=torch.int64),
            "t2d": torch.arange(320) < 8,
        },
        "draft config draft_vocab_size=8: expected at least 16 rows of the head",
    ),
    "a vocabulary of no size": (
        REDUCED,
        {"draft_vocab_size": 0},
        {},
        "draft config draft_vocab_size=0: expected an integer >= 1.",
    ),
    "a mask row of another width": (
        MASK_TENSOR,
        {},
        {"mask_embedding": torch.zeros(65)},
        "draft tensor mask_embedding=[65]: expected [64]: one row of hidden_size.",
    ),
}


PADDED: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "rows that the config counts": ({"draft_vocab_size": 384}, 384, None),
    "rows that the config does not count": ({}, 384, None),
    "rows beside the number of tokens": ({"draft_vocab_size": 320}, 321, None),
    "fewer rows than the target has tokens": (
        {"draft_vocab_size": 300},
        384,
        "draft tensor d2t=None: expected the offset to the target's id for each of the 300 rows of the head",
    ),
    "fewer rows than the config counts": (
        {"draft_vocab_size": 384},
        383,
        "draft tensor lm_head.weight=[383, 64]: expected [384, 64]: [draft_vocab_size, hidden_size].",
    ),
}


@pytest.mark.parametrize(("fields", "rows", "message"), PADDED.values(), ids=PADDED)
def test_rows_of_a_head_beyond_the_targets_vocabulary_are_padding(
    tmp_path: Path, fields: dict[str, Any], rows: int, message: str | None
) -> None:
    from dflash_sglang.worker import DFlashWorker

    draft = change(FORMATS[OWN_HEAD](tmp_path), fields, {"lm_head.weight": matrix(rows, 64, 1)})
    if message is None:
        assert launch(draft) is DFlashWorker
    else:
        assert refusal(draft).startswith(message)


@refused("a malformed module of its own")
@pytest.mark.parametrize(("name", "config", "tensors", "message"), ROWS.values(), ids=ROWS.keys())
def test_a_malformed_module_of_the_drafts_own_ends_start_up_and_is_named(
    tmp_path: Path, name: str, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    problem = refusal(change(FORMATS[name](tmp_path), config, tensors))
    assert problem.startswith(message)


UNREAD = [
    (OWN_HEAD, {}, "has_lm_head=True"),
    (OWN_HEAD, {"has_lm_head": None, "has_embed_tokens": True}, "has_embed_tokens=True"),
    (REDUCED, {}, "draft_vocab_size="),
]


@refused("a module of its own in files of another format")
@pytest.mark.parametrize(("name", "config", "said"), UNREAD, ids=str)
def test_modules_of_the_drafts_own_are_asked_for_in_safetensors(
    tmp_path: Path, name: str, config: dict[str, Any], said: str
) -> None:
    draft = change(FORMATS[name](tmp_path), config, {})
    (draft / "model.safetensors").unlink()
    (draft / "pytorch_model.bin").touch()
    problem = refusal(draft)
    assert problem.startswith(f"draft config {said}") and "Convert the checkpoint to safetensors." in problem


MASK_FILES: dict[str, tuple[Any, str]] = {
    "of another mask token": (
        {"embedding": torch.zeros(64), "mask_token_id": 4},
        "draft file mask_embedding.pt mask_token_id=4: expected the config's mask_token_id of 3.",
    ),
    "of another width": (
        {"embedding": torch.zeros(65), "mask_token_id": 3},
        "draft file mask_embedding.pt=[65]: expected [64]: one row of hidden_size.",
    ),
    "with a row per position": (
        {"embedding": torch.zeros(7, 64), "mask_token_id": 3, "per_position": True},
        "draft config mask_embedding.pt='one row per position of the block': expected one embedding row",
    ),
    "without a tensor": (
        {"mask_token_id": 3},
        "draft config mask_embedding.pt=\"dict with ['mask_token_id']\": expected one embedding row",
    ),
    # Unpickling it would call Path: nothing but tensors may come out of this file.
    "with an object": (
        Path("here"),
        "draft config mask_embedding.pt='a file of another kind (UnpicklingError: Weights",
    ),
}


@refused("a malformed mask_embedding.pt")
@pytest.mark.parametrize(("saved", "message"), MASK_FILES.values(), ids=MASK_FILES.keys())
def test_a_mask_embedding_file_that_does_not_fit_is_named(tmp_path: Path, saved: Any, message: str) -> None:
    directory = FORMATS[MASK_FILE](tmp_path)
    torch.save(saved, directory / "mask_embedding.pt")
    assert refusal(directory).startswith(message)


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
