"""Launches that cannot be served end the launcher with one line a problem, whatever is wrong with them.

Each launch resolves SGLang's own server arguments, up to where processes would start.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.draft_formats import speculators_config
from tests.support.reference_dflash2 import dflash2_config
from tests.support.start_up import hook_launcher, refused, resolved, tells
from tests.support.tiny import draft_config, make_pair, target_config


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

    def launch(self, draft: Path | None, *extra: str, target: Path | None = None) -> str | None:
        """The lines that end the launcher, None where it does not end."""
        outcome = resolved(target or self.target, draft, *extra)
        return outcome if isinstance(outcome, str) else None


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with pytest.MonkeyPatch.context() as patch:
        hook_launcher(patch)
        yield Launcher(tmp_path_factory.mktemp("launches"))


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


# ---- Configs -----------------------------------------------------------------------------------------------

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
READ = "expected a value that SGLang can read ("
ANOTHER = "Give --speculative-draft-model-path a draft of one of these architectures."
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": []}, f"dtype=[]: {READ}IndexError ... Remove dtype, or correct it in the draft's config.json."),
    ({"torch_dtype": "bfloat17"}, f"torch_dtype='bfloat17': {READ}AttributeError"),
    ({"model_type": None}, f"model_type=None: {READ}ValueError ... Add model_type to the draft's config.json."),
    ({"attention_dropout": False}, f"attention_dropout=False: {READ}"),
    ({"model_type": "qwen33", **ROPE}, f"model_type='qwen33': {READ}ValueError"),
    (target_config(), f"architectures=['Qwen3ForCausalLM']: expected a DFLASH draft: ... {ANOTHER}"),
    ({"head_dim": 2**31}, "head_dim=2147483648: expected an integer of at most 2147483647. Correct head_dim in"),
    ({"rope_theta": 10**400}, "rope_theta=1000"),
    ({"partial_rotary_factor": 1.7e308},
     "partial_rotary_factor=2147483647: expected an even rotary width of at most head_dim=16. "),
    ({"num_hidden_layers": 5_000_000, "layer_types": None},
     "num_hidden_layers=5000000: expected an integer of at most 1024. "),
    ({"num_labels": 10**9}, "num_labels=1000000000: expected an integer of at most 1024"),
    ({"extra": nested(40)},
     "extra='objects and lists inside of one another': expected at most 32 levels of them. Serve"),
    ({"extra": "x" * (1 << 22)}, "file='41 ... a config.json of at most 4194304 bytes. Serve another draft."),
    ({"dflash_config": {"use_aux_hidden_state": False}},
     "dflash_config.use_aux_hidden_state=False: expected true: a draft whose fc joins ... Serve a draft that was "
     "trained with them; this one takes the target's last hidden state"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
     "eagle_aux_hidden_state_layer_ids=[1, 3, 4]: expected [2, 4, 5]: each of target_layer_ids=[1, 3, 4] and 1, "
     "as vLLM counts them. Keep the one that the draft was trained with"),
    ({"dflash_config": {"target_layer_ids": None}, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
     "target_layer_ids=None: expected the target's layers beside eagle_aux_hidden_state_layer_ids=[2, 4, 5]. "
     "Write the numbers of eagle_aux_hidden_state_layer_ids less 1 into dflash_config.target_layer_ids of the"),
    ({"quantization_config": "fp8"}, "quantization_config='fp8': expected an object with a quant_method. Add "),
    ({"text_config": {"is_hybrid_swa": True}},
     "is_hybrid_swa=True: expected false: context KV is written into one pool ... Remove it from"),
]  # fmt: skip


@refused("with a malformed config.json")
@refused("an ordinary model", "draft config architectures=['Qwen3ForCausalLM']: expected a DFLASH draft: ")
def test_a_config_that_cannot_be_read_is_named_by_its_field(launcher: Launcher) -> None:
    said = [(launcher.launch(launcher.write(draft_config(**fields))), says) for fields, says in CONFIGS]
    failures = [one for one in said if not tells(one[0], f"draft config {one[1]}")]
    assert failures == [] and not [line for line, _ in said if "\n" in str(line) or len(str(line)) > 2000]
    deep = '{"a":' * 10_000, "[" * 10_000 + "]" * 10_000
    for text in ("", "[]", "{", "{}", *deep, f'{{"a": {"9" * 5000}}}'):
        said = launcher.launch(launcher.write(text))
        named = ("--speculative-draft-model-path='", "draft config architectures=None")
        assert str(said).startswith(named), text[:9]


def test_fields_that_vllm_reads_are_fine_where_they_say_the_same(launcher: Launcher) -> None:
    said = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    for fields in (said, {"dflash_config": said}, {"eagle_config": said}):
        assert launcher.launch(launcher.write(draft_config(**fields))) is None


# ---- Flags, alone and beside a draft -----------------------------------------------------------------------

PATH, TOKENS = "--speculative-draft-model-path", "--speculative-num-draft-tokens"
BACKEND = "--speculative-draft-attention-backend"
UNQUANT = "Set --speculative-draft-model-quantization unquant"
TRANSFER, BUILT_IN = "--disaggregation-transfer-backend", "SGLANG_PLUGINS=none: SGLang's built-in worker"
# fields of the draft's config.json (None: no draft), flags -> each line of the refusal; none where it is served
LAUNCHES: list[tuple[dict[str, Any] | None, str, list[str]]] = [
    ({}, "", []),
    (None, "", [f"{PATH}=None: expected the DFlash draft's directory or repository. Add {PATH}."]),
    (None, f"{PATH} /nowhere/draft", [f"{PATH}='/nowhere/draft': expected a DFlash draft's directory, or its "
     "repository on the hub, with a config.json. Correct it: no such directory"]),
    (None, f"{PATH} {__file__}", [f"{PATH}='{__file__}': expected a DFlash draft's directory ... is a file."]),
    ({"block_size": 1, "num_target_layers": 6, "dflash_config": {"mask_token_id": 320}}, "--pp-size 2",
     ["--pp-size=2: ", "draft config block_size=1: ", "draft config mask_token_id=320: ",
      "draft config num_target_layers=6: "]),
    ({"dflash_config": {"target_layer_ids": [5, -1, 5]}}, "",
     [f"draft config target_layer_ids=[5, -1, 5]: expected {one}" for one in ("layers of", "each layer once")]),
    ({}, f"--disaggregation-mode decode {TRANSFER} mori", [f"{TRANSFER}='mori': expected one of mooncake, "
     f"mooncake_tcp, nixl, fake with DFLASH. Set {TRANSFER} to one of these, or set {BUILT_IN}"]),
    ({}, "--tp-size 4 --attn-cp-size 2 --dcp-size 2", ["--attn-cp-size=2: ", "--dcp-size=2: "]),
    ({}, f"{TOKENS} 9", [f"{TOKENS}=9: expected at most ... Set {TOKENS} 8, or remove it."]),
    ({}, f"{BACKEND} flashinfer", [f"{BACKEND}='flashinfer': expected one that ... torch_native"]),
    ({}, "--load-format gguf", ["--speculative-draft-load-format=None: expected the draft's own format beside a "
     ".gguf target, as which SGLang would load it. Set --speculative-draft-load-format auto."]),
    ({}, "--quantization awq", [f"--quantization='awq': ... {UNQUANT}"]),
    ({}, "--is-embedding", ["--is-embedding=True: expected unset with DFLASH: SGLang answers with embeddings and "
     "generates no tokens. Remove --is-embedding, or serve without speculation."]),
]  # fmt: skip


def test_a_launch_ends_with_every_problem(launcher: Launcher) -> None:
    for fields, flags, lines in LAUNCHES:
        draft = None if fields is None else launcher.write(draft_config(**fields))
        said = (launcher.launch(draft, *flags.split()) or "").splitlines()
        assert len(said) == len(lines) and all(map(tells, said, lines)), (flags, said)


# ---- Which model is which ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("roles", "says"), [
    (("draft", "target"), "a target, and it is a DFLASH draft. Target and draft are swapped: exchange them."),
    (("draft", "another draft"), "a target, and it is a DFLASH draft. Give a target."),
    (("draft", "draft"), "another checkpoint than the draft, and both are the same. Correct one of them."),
])  # fmt: skip
def test_a_pair_that_is_mixed_up_is_named_as_the_doctor_does(
    launcher: Launcher, roles: tuple[str, str], says: str
) -> None:
    directories = {"target": launcher.target, "draft": launcher.draft}
    target, draft = (directories.get(role) or launcher.write(draft_config()) for role in roles)
    assert launcher.launch(draft, target=target) == f"--model-path='{target}': expected {says}"


FEEDS = (
    "a target whose class in SGLang has set_dflash_layers_to_capture or set_eagle3_layers_to_capture, which feed"
)
WITHOUT, IMPL = "Serve it without --speculative-algorithm DFLASH.", "--model-impl transformers"
TAKEN = "the draft (SGLang takes Transformers{}ForCausalLM). "
EMBEDS = "a target that generates tokens, and SGLang answers with embeddings or scores of this one."


@pytest.mark.matrix(target="without a capture method", draft="any", kv="any", outcome="refused")
@pytest.mark.matrix(target="generates no tokens", draft="any", kv="any", outcome="refused")
@pytest.mark.parametrize(("name", "flags", "says"), [
    ("Gemma2ForCausalLM", "", f"{FEEDS} the draft. {WITHOUT}"),
    ("NobodysForCausalLM", "", f"{FEEDS} {TAKEN.format('')}{WITHOUT}"),
    ("Qwen3ForCausalLM", IMPL, f"{FEEDS} {TAKEN.format('')}Remove --model-impl. {WITHOUT}"),
    ("Qwen3MoeForCausalLM", IMPL, f"{FEEDS} {TAKEN.format('MoE')}Remove --model-impl. {WITHOUT}"),
    *((name, "", f"{EMBEDS} {WITHOUT}") for name in ("Qwen3ForSequenceClassification", "Qwen3Model", "BertModel")),
])  # fmt: skip
def test_a_target_that_cannot_feed_a_draft_or_writes_nothing_is_refused_before_it_is_loaded(
    launcher: Launcher, name: str, flags: str, says: str
) -> None:
    target = launcher.write(target_config(architectures=[name]), weights=False)
    said = launcher.launch(launcher.draft, *flags.split(), target=target)
    assert said == f"target config architectures=['{name}']: expected {says}"


def test_a_wrapper_hands_out_features_where_its_language_model_does() -> None:
    from dflash_sglang.startup.target_class import hands_out_features

    for wrapper in ("LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"):
        for text, captures in (("llama", True), ("qwen2", True), ("gemma2", False), ("no", False)):
            assert hands_out_features([wrapper], SimpleNamespace(model_type=text), "auto") is captures
            assert not hands_out_features([wrapper], SimpleNamespace(model_type=text), "transformers")


def test_the_class_of_a_target_is_the_one_that_sglang_takes() -> None:
    from sglang.srt.models.registry import ModelRegistry

    from dflash_sglang.startup.target_class import CAPTURE_METHODS, defined_classes

    able = {n: m for n, m in ModelRegistry.models.items() if any(hasattr(m, method) for method in CAPTURE_METHODS)}
    assert len(able) > 40 and able.keys() < ModelRegistry.models.keys()
    assert {name: next(defined_classes(name), None) for name in able} == able


# ---- The target's flag for its config ----------------------------------------------------------------------


def test_no_key_of_the_flag_for_the_targets_config_reaches_the_draft(launcher: Launcher) -> None:
    from dflash_sglang.sglang_names.launcher import draft_model_config_of, model_config_of, resolving_view

    def read(*flags: str) -> tuple[Any, dict[str, Any]]:
        """The target's config and the draft's."""
        server_args = resolved(launcher.target, launcher.draft, *flags)
        assert resolving_view(server_args).speculative_num_draft_tokens == 8
        draft = draft_model_config_of(server_args, str(launcher.draft)).hf_config.to_dict()
        return model_config_of(server_args).hf_config, draft

    _, unchanged = read()
    for field, wanted in {
        "architectures": ["LlamaForCausalLM"],
        "block_size": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "num_hidden_layers": 5,  # as the target has
        "max_position_embeddings": 96,
    }.items():
        target, draft = read("--json-model-override-args", json.dumps({field: wanted}))
        found = getattr(target, field)
        assert found == wanted or (isinstance(wanted, dict) and wanted.items() <= found.items())
        assert draft == unchanged, field


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


def test_a_missing_shard_and_a_malformed_index_are_named(launcher: Launcher) -> None:
    directory, name = launcher.write(draft_config()), "model.safetensors.index.json"
    shards = {"fc.weight": "model.safetensors", "norm.weight": "model-2.safetensors"}
    for text, says in {
        json.dumps({"weight_map": shards}): f"draft file {name}=['model-2.safetensors']: expected the files that "
        f"it names in {directory}. Download them; the download may have been cut short.",
        json.dumps({"weight_map": {"fc.weight": "model.safetensors"}}): None,
        **{bad: f"draft config {name}='{len(bad)} bytes': expected a JSON object ... Download it again."
           for bad in ("", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}')},
    }.items():  # fmt: skip
        (directory / name).write_text(text)
        said = launcher.launch(directory)
        assert said is None if says is None else tells(said, says), (text, said)


IDS, HOT_VOCAB = "a list of token ids, saved by torch.save (", "Make one with `dflash-sglang hot-vocab`."


def test_a_token_map_that_is_none_is_named(launcher: Launcher) -> None:
    path = launcher.root / "map.pt"
    for saved, says in [
        ("the quick brown fox\n1\n2\n", IDS),
        (torch.zeros(20, dtype=torch.complex64), "integers in one dimension, found torch.complex64 of shape [20]"),
    ]:
        path.write_text(saved) if isinstance(saved, str) else torch.save(saved, path)
        said = launcher.launch(launcher.draft, "--speculative-token-map", str(path))
        assert tells(said, f"--speculative-token-map='{path}': expected {says}"), said
        assert str(said).endswith(HOT_VOCAB) and "\n" not in str(said)


# ---- Any config --------------------------------------------------------------------------------------------

# Of every kind that JSON has, with the edges that code trips over.
ODD = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 2**31, 5_000_000, 10**400, -0.5, 1e308, 5e-324, float("nan")]),
    st.sampled_from(["", "x", "\0", "qwen3", "auto", "\n\u2028", [], {}, [[]], [None], {"": {}}, float("inf")]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 5000) | st.floats(width=16) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
        max_leaves=5,
    ),
)
# Fields that readers know and few configs have.
EXTRA = (
    "auto_map dtype eagle_config is_causal is_hybrid_swa layer_types mask_embedding n_layer num_labels "
    "partial_rotary_factor quantization_config rope_parameters rope_scaling text_config transformer_layer_config "
    "use_sliding_window vision_config speculators_model_type draft_vocab_size attention_mode projector_type "
    "sub_configs torch_dtype head_dim compression_config use_swa"
).split()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "mscale": 1.0}
BASES = (
    draft_config(),
    draft_config(rope_scaling=YARN, text_config={"hidden_size": 64}, eagle_config={}),
    draft_config(quantization_config={"quant_method": "fp8", "config_groups": {"a": {"weights": {}}}}),
    dflash2_config(),
    speculators_config(draft_config()),
    draft_config(architectures=["Qwen3DSparkModel"], markov_rank=4, markov_head_type="lstm"),
)  # fmt: skip


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """A config and the objects in it."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(inner)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(base=st.sampled_from(BASES), changes=st.integers(1, 3), data=st.data())
def test_any_config_is_served_or_refused_with_one_line_soon(
    launcher: Launcher, base: dict[str, Any], changes: int, data: st.DataObject
) -> None:
    """With fields changed, added or taken away, at any depth."""
    config = copy.deepcopy(base)
    for _ in range(changes):
        inner = data.draw(st.sampled_from(list(objects(config))))
        inner[data.draw(st.sampled_from([*inner, *EXTRA]))] = copy.deepcopy(data.draw(ODD))
        if data.draw(st.integers(0, 9)) == 0:
            inner.popitem()
    directory = launcher.write(config)
    started = time.process_time()
    said = launcher.launch(directory)
    assert time.process_time() - started < 5
    assert said is None or (": expected " in said and all(len(line) < 2500 for line in said.splitlines()))
    shutil.rmtree(directory)
