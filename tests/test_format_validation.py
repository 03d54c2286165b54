"""Malformed drafts of each format end start-up with the field, its value, what was expected and what to change."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_sglang import hooks
from dflash_sglang.checkpoint import weights_directory
from dflash_sglang.families import foreign
from dflash_sglang.own_modules import own_modules
from dflash_sglang.validation import StartupError
from tests.draft_formats import FORMATS, KEPT, matrix, speculators_config
from tests.test_plugin import Algorithm, BuiltInWorker, arguments, built_in
from tests.tiny import draft_config, make_pair

SPECULATORS = "speculators with its own head and embedding"
REDUCED = "speculators with a reduced vocabulary"
OWN_EMBEDDING = "z-lab with its own embedding, the mask beyond the target's vocabulary"
OWN_HEAD = "z-lab with its own head"
SINKS = "z-lab with attention sinks and a value scale"
SCALED = "z-lab with scaled embeddings and scaled, capped logits"
MASK_FILE = "z-lab with mask_embedding.pt"
MASK_TENSOR = "z-lab with a mask_embedding tensor"


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's views of server arguments replaced by the arguments themselves, for a target of 320 tokens."""
    from dflash_sglang import startup

    text = SimpleNamespace(num_hidden_layers=5, hidden_size=64, vocab_size=320)
    config = SimpleNamespace(hf_text_config=text, hf_config=SimpleNamespace(architectures=["TargetForCausalLM"]))
    monkeypatch.setattr(startup, "resolving_view", lambda args: args)
    monkeypatch.setattr(startup, "model_config_of", lambda args: config)
    monkeypatch.setattr(startup, "mambaish_config", lambda config: None)
    monkeypatch.delenv("DFLASH_SGLANG_REQUIRE", raising=False)
    monkeypatch.delenv("DFLASH_SGLANG_CONFIG", raising=False)
    return text


def launch(directory: Path, **overrides: Any) -> type:
    return hooks.create_worker(built_in, Algorithm(), arguments(directory, **overrides))


def refusal(directory: Path, **overrides: Any) -> str:
    """The one problem that ends start-up."""
    with pytest.raises(StartupError) as caught:
        launch(directory, **overrides)
    assert str(caught.value).count("\n") == 1, caught.value
    return str(caught.value).splitlines()[1].removeprefix("  - ")


def change(directory: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Changes fields and tensors of a checkpoint; None removes."""
    old = json.loads((directory / "config.json").read_text())
    for key, value in config.items():
        merged = {**old[key], **value} if isinstance(value, dict) and key in old else value
        old[key] = merged
    kept = {key: value for key, value in old.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(kept))
    held = {**load_file(directory / "model.safetensors"), **tensors}
    save_file({k: v for k, v in held.items() if v is not None}, directory / "model.safetensors")
    return directory


absolute = torch.tensor(KEPT)
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no layer ids": (
        SPECULATORS,
        {"aux_hidden_state_layer_ids": None},
        {},
        "draft config aux_hidden_state_layer_ids=None: expected a non-empty list of integers >= 1",
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
        "draft config mask_token_id=None: expected the id in the draft's own vocabulary that stands for a "
        "position to be proposed. Add mask_token_id",
    ),
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


def refused(draft: str, message: str | None = None) -> pytest.MarkDecorator:
    return pytest.mark.matrix(draft=draft, outcome="refused", message=message)


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
    "with an object": (Path("here"), "draft config mask_embedding.pt='a file of another kind (Weights only load"),
}


@refused("a malformed mask_embedding.pt")
@pytest.mark.parametrize(("saved", "message"), MASK_FILES.values(), ids=MASK_FILES.keys())
def test_a_mask_embedding_file_that_does_not_fit_is_named(tmp_path: Path, saved: Any, message: str) -> None:
    directory = FORMATS[MASK_FILE](tmp_path)
    torch.save(saved, directory / "mask_embedding.pt")
    assert refusal(directory).startswith(message)


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


# ---- What no worker reads -------------------------------------------------------------------------------------


@refused("speculators: DSpark, DFlash2, Domino, or launches of the built-in worker")
@pytest.mark.parametrize(
    ("config", "flags", "field"),
    [
        ({"sample_from_anchor": True}, {}, "draft config sample_from_anchor=True"),
        ({"speculators_model_type": "dspark"}, {}, "draft config speculators_model_type='dspark'"),
        ({"projector_type": "domino"}, {}, "draft config projector_type='domino'"),
        ({"architectures": ["DSparkDraftModel"]}, {}, "draft config architectures='DSparkDraftModel'"),
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
    draft = make_pair(tmp_path, draft={"dflash_config": {"sample_from_anchor": True}})[1]
    with caplog.at_level(logging.WARNING, logger="dflash_sglang"):
        assert launch(draft) is BuiltInWorker
    assert "sample_from_anchor=True: DSpark's layout" in caplog.text


def test_the_older_name_of_the_architecture_is_plain_in_the_speculators_format_alone() -> None:
    assert foreign(speculators_config(draft_config(), architectures=["DFlashSpeculator"])) is None
    assert foreign(draft_config(architectures=["DFlashSpeculator"])) is not None


# ---- What SGLang reads ----------------------------------------------------------------------------------------


def parsed(directory: Path) -> Any:
    def original(*args: Any, **kwargs: Any) -> str:
        return "SGLang's"

    return hooks.parse_config(original, None, str(directory), trust_remote_code=False, revision=None)


def test_sglang_reads_a_speculators_config_as_that_of_its_decoder(tmp_path: Path) -> None:
    config = parsed(FORMATS[REDUCED](tmp_path))
    assert (config.model_type, config.architectures) == ("qwen3", ["DFlashDraftModel"])
    assert (config.hidden_size, config.num_hidden_layers, config.block_size) == (64, 2, 8)
    assert config.target_layer_ids == [1, 3, 4]
    assert config.dtype == torch.float32
    assert config._name_or_path == str(tmp_path)


def test_a_hub_repositorys_modules_are_read_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, commit = tmp_path / "models--acme--draft", "0" * 40
    FORMATS[MASK_FILE](repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    directory = weights_directory("acme/draft", None)
    assert directory == repository / "snapshots" / commit
    mask = own_modules(directory).mask_embedding
    assert mask is not None and mask.row.shape == (64,)


def test_sglang_reads_every_other_config_by_itself(tmp_path: Path) -> None:
    target, draft = make_pair(tmp_path)
    foreign_draft = change(FORMATS[SPECULATORS](tmp_path / "s"), {"sample_from_anchor": True}, {})
    assert [parsed(path) for path in (target, draft, foreign_draft)] == ["SGLang's"] * 3
