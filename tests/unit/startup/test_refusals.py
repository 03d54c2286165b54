"""Checkpoints that cannot be served end the launcher with one line, whatever is wrong with them.

Each launch resolves SGLang's own server arguments, up to where processes would start.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_sglang import hooks
from dflash_sglang.startup.facts import StartupError
from tests.support.start_up import hook_configs, refused
from tests.support.tiny import draft_config, make_pair, target_config
from tests.unit.checkpoint.test_dflash2_config import dflash2_config
from tests.unit.startup.test_validation import launch_arguments


class Launcher:
    """Drafts beside one target. ``target``, ``draft``: of a pair that can be served."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target, self.draft = make_pair(root / "pair")
        self._made = 0

    def write(self, config: object, weights: bool = True) -> Path:
        """A draft's directory with this config.json (text as it stands) and the pair's weights."""
        self._made += 1  # SGLang keeps the configs that it has read by their paths
        directory = self.root / f"draft{self._made}"
        directory.mkdir()
        (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if weights:
            (directory / "model.safetensors").symlink_to(self.draft / "model.safetensors")
        return directory

    def resolved(self, draft: Path, *extra: str, target: Path | None = None) -> Any:
        """The server arguments of a launch. Raises StartupError."""
        from sglang.srt.server_args import prepare_server_args

        server_args = prepare_server_args(launch_arguments(target or self.target, draft, list(extra)))
        server_args.resolve_once()
        return server_args

    def launch(self, draft: Path, *extra: str, target: Path | None = None) -> str | None:
        """The one line that ends the launcher, None where it does not end."""
        try:
            self.resolved(draft, *extra, target=target)
        except StartupError as error:
            first, *problems = str(error).splitlines()
            assert first == "DFLASH cannot start:" and len(problems) == len(error.problems)
            return "\n".join(problem.removeprefix("  - ") for problem in problems)
        return None


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """SGLang's resolution with this package's hooks around it."""
    from sglang.srt.arg_groups import resolution_hooks

    def resolve(server_args: Any, original: Callable[..., None]) -> None:
        hooks.handle_speculative_decoding(original, server_args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resolution_hooks._HOOKS, "handle_speculative_decoding", [resolve])
        hook_configs(patch)
        patch.setattr(hooks, "_resolved", None)
        patch.delenv("DFLASH_SGLANG_REQUIRE", raising=False)
        patch.delenv("DFLASH_SGLANG_CONFIG", raising=False)
        yield Launcher(tmp_path_factory.mktemp("launches"))


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


# ---- Configs -----------------------------------------------------------------------------------------------

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
READ = "expected a value that SGLang can read ("
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a dtype of none": ({"dtype": []}, f"draft config dtype=[]: {READ}IndexError"),
    "an unknown dtype": (
        {"torch_dtype": "bfloat17"},
        f"draft config torch_dtype='bfloat17': {READ}AttributeError",
    ),
    "no model type": ({"model_type": None}, f"draft config model_type=None: {READ}ValueError"),
    "a flag for a rate": ({"attention_dropout": False}, f"draft config attention_dropout=False: {READ}"),
    "an integer for a float": ({"initializer_range": 1}, f"draft config initializer_range=1: {READ}"),
    "labels that are no table": ({"id2label": 5}, f"draft config id2label=5: {READ}"),
    "an unknown model type": (
        {"model_type": "qwen33", "rope_parameters": ROPE},
        f"draft config model_type='qwen33': {READ}ValueError",
    ),
    "a list for a model type": (
        {"model_type": [1], "rope_parameters": ROPE},
        f"draft config model_type=[1]: {READ}TypeError",
    ),
    "lists of names": (
        {"architectures": [["DFlashDraftModel"]]},
        "draft config architectures=[['DFlashDraftModel']]: ",
    ),
    "another model's name first": (
        {"architectures": ["Qwen3ForCausalLM", "DFlashDraftModel"]},
        "draft config architectures=['Qwen3ForCausalLM', 'DFlashDraftModel']: expected a DFLASH draft: ",
    ),
    "a list for a mask token": (
        {"dflash_config": {"mask_token_id": [3]}},
        "draft config dflash_config.mask_token_id=[3]: expected an integer >= 0. ",
    ),
    "a size beyond int32": (
        {"head_dim": 2**31},
        "draft config head_dim=2147483648: expected an integer of at most ",
    ),
    "a base that no float holds": ({"rope_theta": 10**400}, "draft config rope_theta=1000"),
    "a share that no float holds": (
        {"partial_rotary_factor": 1.7e308},
        "draft config partial_rotary_factor=2147483647: expected an even rotary width of at most head_dim=16. ",
    ),
    "millions of layers": (
        {"num_hidden_layers": 5_000_000, "layer_types": None},
        "draft config num_hidden_layers=5000000: expected an integer of at most 1024. ",
    ),
    "millions of layers further in": (
        {"text_config": {"num_hidden_layers": 5_000_000}},
        "draft config text_config.num_hidden_layers=5000000: expected an integer of at most 1024. ",
    ),
    "millions of labels": (
        {"num_labels": 10**9},
        "draft config num_labels=1000000000: expected an integer of at most ",
    ),
    "objects in objects": (
        {"extra": nested(40)},
        "draft config extra='objects and lists inside of one another': ",
    ),
    "features of one layer": (
        {"dflash_config": {"use_aux_hidden_state": False}},
        "draft config dflash_config.use_aux_hidden_state=False: expected true: a draft whose fc joins ",
    ),
    "features of one layer, as of EAGLE": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "draft config eagle_config.use_aux_hidden_state=False: expected true: ",
    ),
    "a number for that flag": (
        {"use_aux_hidden_state": 0},
        "draft config use_aux_hidden_state=0: expected true or false. ",
    ),
    "other layers for vLLM": (
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "draft config eagle_aux_hidden_state_layer_ids=[1, 3, 4]: expected [2, 4, 5]: each of target_layer_ids=",
    ),
    "layers for vLLM alone": (
        {"dflash_config": {"target_layer_ids": None}, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
        "draft config target_layer_ids=None: expected the target's layers beside "
        "eagle_aux_hidden_state_layer_ids=[2, 4, 5]. Write the numbers of eagle_aux_hidden_state_layer_ids less 1 "
        "into dflash_config.target_layer_ids",
    ),
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [pytest.param(*row, marks=refused("with a malformed config.json", row[1])) for row in CONFIGS.values()],
    ids=CONFIGS,
)
def test_a_config_that_cannot_be_read_is_named_by_its_field(
    launcher: Launcher, fields: dict[str, Any], message: str
) -> None:
    said = launcher.launch(launcher.write(draft_config(**fields)))
    assert said is not None and said.startswith(message) and "\n" not in said and len(said) < 2000, said


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "{}", '{"a":' * 10_000, "[" * 10_000 + "]" * 10_000, f'{{"a": {"9" * 5000}}}'],
    ids=len,
)
def test_a_file_that_is_no_config_is_named(launcher: Launcher, text: str) -> None:
    said = launcher.launch(launcher.write(text))
    assert said is not None and said.startswith(
        ("--speculative-draft-model-path='", "draft config architectures=None")
    )


def test_a_large_config_is_refused_unread(launcher: Launcher) -> None:
    said = launcher.launch(launcher.write(json.dumps(draft_config(extra="x" * (1 << 22)))))
    assert said is not None and said.startswith("draft config file='41")


def test_fields_that_vllm_reads_are_fine_where_they_say_the_same(launcher: Launcher) -> None:
    said = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    for fields in (said, {"dflash_config": said}, {"eagle_config": said}):
        assert launcher.launch(launcher.write(draft_config(**fields))) is None


# ---- Which model is which ----------------------------------------------------------------------------------


@refused("an ordinary model", "draft config architectures=['Qwen3ForCausalLM']: expected a DFLASH draft: ")
def test_another_model_in_place_of_the_draft_is_refused(launcher: Launcher) -> None:
    said = launcher.launch(launcher.write(target_config()))
    assert said is not None
    assert said.startswith("draft config architectures=['Qwen3ForCausalLM']: expected a DFLASH draft: ")


@pytest.mark.parametrize(("roles", "says"), [
    (("draft", "target"), "a target, and it is a DFLASH draft. Target and draft are swapped: exchange them."),
    (("draft", "another draft"), "a target, and it is a DFLASH draft. Give a target."),
    (("target", "target"), "another checkpoint than the draft, and both are the same. Correct one of them."),
    (("draft", "draft"), "another checkpoint than the draft, and both are the same. Correct one of them."),
])  # fmt: skip
def test_a_pair_that_is_mixed_up_is_named_as_the_doctor_does(
    launcher: Launcher, roles: tuple[str, str], says: str
) -> None:
    directories = {"target": launcher.target, "draft": launcher.draft}
    target, draft = (directories.get(role) or launcher.write(draft_config()) for role in roles)
    assert launcher.launch(draft, target=target) == f"--model-path='{target}': expected {says}"


NO_CAPTURE = (
    "expected a target whose class in SGLang has set_dflash_layers_to_capture or set_eagle3_layers_to_capture"
)


@pytest.mark.matrix(
    target="without a capture method", draft="any", kv="any", outcome="refused", message=f"...: {NO_CAPTURE}"
)
@pytest.mark.parametrize(
    ("name", "extra", "taken"),
    [
        ("Gemma2ForCausalLM", (), ", which feed the draft. Serve it"),
        ("NobodysForCausalLM", (), " (SGLang takes TransformersForCausalLM). Serve it"),
        (
            "Qwen3ForCausalLM",
            ("--model-impl", "transformers"),
            " (SGLang takes TransformersForCausalLM). Remove --model-impl. Serve it",
        ),
        (
            "Qwen3MoeForCausalLM",
            ("--model-impl", "transformers"),
            " (SGLang takes TransformersMoEForCausalLM). Remove --model-impl. Serve it",
        ),
    ],
)
def test_a_target_without_a_capture_method_is_refused_before_it_is_loaded(
    launcher: Launcher, name: str, extra: tuple[str, ...], taken: str
) -> None:
    target = launcher.write(target_config(architectures=[name]), weights=False)
    said = launcher.launch(launcher.draft, *extra, target=target)
    assert said is not None and said.startswith(f"target config architectures=['{name}']: {NO_CAPTURE}")
    assert f"{taken} without --speculative-algorithm DFLASH." in said


WRAPPERS = ("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("text", "captures"), [("llama", True), ("mistral", True), ("qwen2", True), ("gemma2", False), ("no", False)]
)
def test_a_wrapper_hands_out_features_where_its_language_model_does(
    wrapper: str, text: str, captures: bool
) -> None:
    from dflash_sglang.startup.target_class import hands_out_features

    assert hands_out_features([wrapper], SimpleNamespace(model_type=text), "auto") is captures
    assert not hands_out_features([wrapper], SimpleNamespace(model_type=text), "transformers")


@pytest.mark.matrix(target="generates no tokens", draft="any", kv="any", outcome="refused")
@pytest.mark.parametrize(("changed", "flags", "message"), [
    ({}, ("--is-embedding",), "--is-embedding=True: expected unset with DFLASH: SGLang answers with embeddings"),
    *(({"architectures": [name]}, (), f"target config architectures=['{name}']: expected a target that generates")
      for name in ("Qwen3ForSequenceClassification", "Qwen3Model", "BertModel")),
])  # fmt: skip
def test_a_launch_that_generates_no_tokens_is_refused(
    launcher: Launcher, changed: dict[str, Any], flags: tuple[str, ...], message: str
) -> None:
    target = launcher.write(target_config(**changed), weights=False)
    said = launcher.launch(launcher.draft, *flags, target=target)
    assert said is not None and said.startswith(message) and "\n" not in said, said


# ---- The target's flag for its config ----------------------------------------------------------------------

OVERRIDES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "block_size": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "num_hidden_layers": 5,  # as the target has
    "max_position_embeddings": 96,
}


@pytest.mark.parametrize("field", OVERRIDES)
def test_no_key_of_the_flag_for_the_targets_config_reaches_the_draft(launcher: Launcher, field: str) -> None:
    from dflash_sglang.sglang_names.launcher import draft_model_config_of, model_config_of, resolving_view

    drafts = {}
    for flags in ([], ["--json-model-override-args", json.dumps({field: OVERRIDES[field]})]):
        server_args = launcher.resolved(launcher.draft, *flags)
        drafts[bool(flags)] = draft_model_config_of(server_args, str(launcher.draft)).hf_config.to_dict()
        assert resolving_view(server_args).speculative_num_draft_tokens == 8
    targets, wanted = getattr(model_config_of(server_args).hf_config, field), OVERRIDES[field]
    assert targets == wanted or wanted.items() <= targets.items()
    assert drafts[True] == drafts[False]


def test_the_class_of_a_target_is_the_one_that_sglang_takes() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from dflash_sglang.startup.target_class import CAPTURE_METHODS, defined_classes

    able = {n: m for n, m in ModelRegistry.models.items() if any(hasattr(m, method) for method in CAPTURE_METHODS)}
    assert len(able) > 40 and able.keys() < ModelRegistry.models.keys()
    assert {name: next(defined_classes(name), None) for name in able} == able


# ---- Weights -----------------------------------------------------------------------------------------------


def test_a_directory_without_weights_is_refused(launcher: Launcher) -> None:
    directory = launcher.write(draft_config(), weights=False)
    torch.save(torch.zeros(64), directory / "mask_embedding.pt")
    said = launcher.launch(directory)
    expected = "expected weights beside its config.json (*.safetensors, *.bin, *.pt, *.pth). Download them too."
    assert said == f"--speculative-draft-model-path='{directory}': {expected}"
    assert launcher.launch(directory, "--speculative-draft-load-format", "dummy") is None
    (directory / "pytorch_model.bin").write_bytes(b"")
    assert launcher.launch(directory) is None


def test_a_missing_shard_is_named(launcher: Launcher) -> None:
    directory = launcher.write(draft_config())
    index = directory / "model.safetensors.index.json"
    weight_map = {"fc.weight": "model.safetensors", "norm.weight": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    said = launcher.launch(directory)
    assert said is not None
    assert said.startswith(
        f"draft file {index.name}=['model-2.safetensors']: expected the files that it names in "
    )
    index.write_text(json.dumps({"weight_map": {"fc.weight": "model.safetensors"}}))
    assert launcher.launch(directory) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_a_malformed_index_is_named(launcher: Launcher, text: str) -> None:
    directory = launcher.write(draft_config())
    (directory / "model.safetensors.index.json").write_text(text)
    said = launcher.launch(directory)
    assert said is not None and said.startswith(f"draft config model.safetensors.index.json='{len(text)} bytes': ")


MASK = "draft config mask_embedding.pt"
TEXT = "the quick brown fox\n1\n2\n"
MASKS: dict[str, tuple[object, str]] = {
    "text": (TEXT, f"{MASK}='a file of another kind ("),
    "nothing": ("", f"{MASK}='a file of another kind ("),
    "a row for each position": (
        {"embedding": torch.zeros(64), "per_position": torch.zeros(8, 64)},
        f"{MASK}='one row per position of the block': ",
    ),
    "a list for the mask token": (
        {"embedding": torch.zeros(64), "mask_token_id": [3]},
        f"{MASK} mask_token_id=[3]: expected the id of the mask token, an integer. ",
    ),
}


@pytest.mark.parametrize(("saved", "message"), MASKS.values(), ids=MASKS)
def test_a_mask_embedding_that_is_none_is_named(launcher: Launcher, saved: object, message: str) -> None:
    directory = launcher.write(draft_config())
    path = directory / "mask_embedding.pt"
    path.write_text(saved) if isinstance(saved, str) else torch.save(saved, path)
    said = launcher.launch(directory)
    assert said is not None and said.startswith(message) and "\n" not in said


TOKENS: dict[str, tuple[object, str]] = {
    "text": (TEXT, "a list of token ids, saved by torch.save ("),
    "nothing": ("", "a list of token ids, saved by torch.save ("),
    "complex numbers": (
        torch.zeros(20, dtype=torch.complex64),
        "integers in one dimension, found torch.complex64 ",
    ),
}


@pytest.mark.parametrize(("saved", "message"), TOKENS.values(), ids=TOKENS)
def test_a_token_map_that_is_none_is_named(launcher: Launcher, saved: object, message: str) -> None:
    path = launcher.root / "map.pt"
    path.write_text(saved) if isinstance(saved, str) else torch.save(saved, path)
    said = launcher.launch(launcher.draft, "--speculative-token-map", str(path))
    assert said is not None and said.startswith(f"--speculative-token-map='{path}': expected {message}")
    assert said.endswith("Make one with `dflash-sglang hot-vocab`.") and "\n" not in said


# ---- Any config --------------------------------------------------------------------------------------------

# Of every kind that JSON has, with the edges that code trips over.
ODD = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2**31, 5_000_000, 10**400, -0.5, 1e308, 5e-324]),
    st.sampled_from(
        [float("nan"), float("inf"), "", "x", "\0", "qwen3", "auto", "\n\u2028", [], {}, [[]], [None], {"": {}}]
    ),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 5000) | st.floats(width=16) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=5,
    ),
)
# Fields that readers know and few configs have.
EXTRA = (
    *(
        "auto_map",
        "dtype",
        "eagle_config",
        "is_causal",
        "is_hybrid_swa",
        "layer_types",
        "mask_embedding",
        "n_layer",
    ),
    *(
        "num_labels",
        "partial_rotary_factor",
        "quantization_config",
        "rope_parameters",
        "rope_scaling",
        "text_config",
    ),
    *(
        "transformer_layer_config",
        "use_sliding_window",
        "vision_config",
        "speculators_model_type",
        "draft_vocab_size",
    ),
    *(
        "attention_mode",
        "projector_type",
        "sub_configs",
        "torch_dtype",
        "head_dim",
        "compression_config",
        "use_swa",
    ),
)


def speculators_config() -> dict[str, Any]:
    decoder = {**draft_config(), "num_hidden_layers": 2}
    top = ("architectures", "num_target_layers", "block_size", "dflash_config")
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 8,
        "mask_token_id": 3,
        "transformer_layer_config": {key: value for key, value in decoder.items() if key not in top},
    }


def foreign_config() -> dict[str, Any]:
    return draft_config(architectures=["Qwen3DSparkModel"], markov_rank=4, markov_head_type="lstm")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 1.0}
BASES = (
    draft_config,
    lambda: draft_config(rope_scaling=YARN, text_config={"hidden_size": 64}, eagle_config={}),
    lambda: draft_config(quantization_config={"quant_method": "fp8", "config_groups": {"a": {"weights": {}}}}),
    dflash2_config,
    speculators_config,
    foreign_config,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all fields and elements of a config."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((*path, key), *places(inner, (*path, key)))]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A config that could be served, with one to three fields changed, added or taken away, at any depth."""
    config = json.loads(json.dumps(draw(st.sampled_from(BASES))()))
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        of_objects = [place for place in [(), *places(config)] if isinstance(found(config, place), dict)]
        new = st.tuples(st.sampled_from(of_objects), st.sampled_from(EXTRA)).map(lambda pair: (*pair[0], pair[1]))
        *path, key = draw(st.sampled_from(places(config)) | new)
        inner = found(config, path)
        if draw(st.integers(0, 9)) == 0 and isinstance(inner, dict):
            inner.pop(key, None)
        else:
            inner[key] = draw(ODD)
    return config


def found(config: Any, path: Iterable[Any]) -> Any:
    return functools.reduce(lambda inner, key: inner[key], path, config)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configs())
def test_any_config_is_served_or_refused_with_one_line_soon(launcher: Launcher, config: dict[str, Any]) -> None:
    directory = launcher.write(config)
    started = time.process_time()
    said = launcher.launch(directory)
    assert time.process_time() - started < 5
    assert said is None or (": expected " in said and all(len(line) < 2500 for line in said.splitlines()))
    shutil.rmtree(directory)
