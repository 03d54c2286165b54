"""A target's own multi-token-prediction layers as the draft: what is read of them, and refused launches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_sglang import hooks
from dflash_sglang.checkpoint.families import mixed_up
from dflash_sglang.checkpoint.fields import DraftConfigError
from dflash_sglang.checkpoint.files import read_config
from dflash_sglang.checkpoint.mtp import MtpSpec, holds_mtp
from dflash_sglang.patches import mtp_config
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from dflash_sglang.sglang_names.launcher import draft_model_config_of, resolving_view
from dflash_sglang.startup.facts import StartupError
from tests.support.start_up import hook_configs
from tests.unit.startup.test_validation import launch_arguments
from tests.zoo import step3p5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return step3p5.write(tmp_path_factory.mktemp("mtp") / "target")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.configs.model_config import ModelConfig

    def resolve(server_args: Any, original: Any) -> None:
        hooks.handle_speculative_decoding(original, server_args)

    monkeypatch.setitem(resolution_hooks._HOOKS, "handle_speculative_decoding", [resolve])
    hook_configs(monkeypatch)
    original = ModelConfig._config_draft_model

    def config_draft_model(config: Any) -> None:
        mtp_config.config_draft_model(original, config)

    monkeypatch.setattr(ModelConfig, "_config_draft_model", config_draft_model)
    monkeypatch.setattr(hooks, "_resolved", None)
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    yield


def launch(target: Path, draft: Path, *extra: str) -> Any:
    """SGLang's resolved arguments, or the problems that end the launcher."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(launch_arguments(target, draft, list(extra)))
    try:
        server_args.resolve_once()
    except StartupError as error:
        return str(error)
    return server_args


def changed(checkpoint: Path, directory: Path, **fields: Any) -> Path:
    """The checkpoint with other fields of its config.json; None removes one."""
    directory.mkdir()
    config = {**json.loads((checkpoint / "config.json").read_text()), **fields}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (directory / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    return directory


def test_the_block_is_a_proposal_of_each_layer(checkpoint: Path, launcher: None) -> None:
    served = launch(checkpoint, checkpoint)
    assert not isinstance(served, str), served
    assert resolving_view(served).speculative_num_draft_tokens == step3p5.MTP_LAYERS + 1


def test_what_is_read(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    spec = MtpSpec.from_config(config)
    assert holds_mtp(config)
    assert (spec.num_layers, spec.num_target_layers, spec.block_size) == (3, 5, 4)
    assert [(layer.kind, layer.window) for layer in spec.layers] == [("sliding_attention", 25)] * 3
    assert [spec.draft_rows(width) for width in (2, 3, 4)] == [4, 4, 4]
    assert "layers.5." in spec.prefix(0)
    assert spec.reach == 2 * 4 + 25


FULL, SLIDING = step3p5.FULL, step3p5.SLIDING
TARGET = step3p5.TYPES[: step3p5.LAYERS]


@pytest.mark.parametrize(
    ("types", "flags", "groups"),
    [
        ([*TARGET, SLIDING, FULL, SLIDING], (), ([1], [0, 2])),
        ([*TARGET, SLIDING, SLIDING, SLIDING], (), ([], [0, 1, 2])),
        ([*TARGET, SLIDING, FULL, SLIDING], ("--disable-hybrid-swa-memory",), None),
        ([*TARGET, FULL, FULL, FULL], (), None),
        ([SLIDING] * 8, (), None),
    ],
)
def test_sliding_layers_are_a_kv_group_where_the_targets_are(
    types: list[str], flags: tuple[str, ...], groups: Any, tmp_path: Path, launcher: None
) -> None:
    target = step3p5.write(tmp_path / "target", types)
    served = launch(target, target, *flags)
    assert not isinstance(served, str), served
    read = draft_model_config_of(served, str(target))
    assert read.is_hybrid_swa == (groups is not None)
    if groups is not None:
        assert (read.full_attention_layer_ids, read.swa_attention_layer_ids) == groups


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no layers": (dict(num_nextn_predict_layers=None), "num_nextn_predict_layers=0: expected an integer >= 1"),
    "types of the target alone": (dict(layer_types=step3p5.TYPES[:5]), "layer_types="),
    "experts": (dict(moe_layers_enum="2,3,4,6"), "moe_layers_enum=[6]: expected no multi-token-prediction layer"),
    "other heads": (
        dict(attention_other_setting=dict(num_attention_heads=6, num_attention_groups=1, head_dim=16)),
        "attention_other_setting.num_attention_groups=1: expected num_attention_groups=2",
    ),
    "quantised": (dict(quantization_config=dict(quant_method="fp8")), "quantization_config="),
}


@pytest.mark.parametrize("case", FIELDS)
def test_fields_that_are_not_served(case: str, checkpoint: Path) -> None:
    fields, message = FIELDS[case]
    config = {key: value for key, value in {**read_config(checkpoint), **fields}.items() if value is not None}
    with pytest.raises(DraftConfigError) as caught:
        MtpSpec.from_config(config)
    assert message in str(caught.value)


LAUNCHES: dict[str, tuple[tuple[str, ...], str]] = {
    "mixed chunks": (("--enable-mixed-chunk",), "--enable-mixed-chunk=True: expected unset"),
    "host cache": (("--enable-hierarchical-cache",), "--enable-hierarchical-cache=True: expected unset"),
    "sessions": (("--enable-streaming-session",), "--enable-streaming-session=True: expected unset"),
    "prefill server": (("--disaggregation-mode", "prefill"), "--disaggregation-mode='prefill': expected 'null'"),
    "another block": (("--speculative-num-draft-tokens", "3"), "--speculative-num-draft-tokens=3: expected 4"),
    "a wider block": (("--speculative-dflash-block-size", "8"), "--speculative-dflash-block-size=8: expected 4"),
    "a window": (("--speculative-draft-window-size", "64"), "--speculative-draft-window-size=64: expected unset"),
    "fp8 KV": (("--kv-cache-dtype", "fp8_e4m3"), "--kv-cache-dtype='fp8_e4m3': expected 'auto'"),
    "a quantised draft": (
        ("--speculative-draft-model-quantization", "fp8"),
        "--speculative-draft-model-quantization='fp8': expected unset",
    ),
    "LoRA": (("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"), "--enable-lora=True"),
    "an overridden config": (
        ("--json-model-override-args", '{"rms_norm_eps": 1e-6}'),
        "--json-model-override-args=",
    ),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches_that_are_not_served(case: str, checkpoint: Path, launcher: None) -> None:
    flags, message = LAUNCHES[case]
    said = launch(checkpoint, checkpoint, *flags)
    assert isinstance(said, str) and message in said, said


@pytest.fixture
def on_gpu(launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up takes the device for a GPU."""
    from dflash_sglang.startup import decisions, fp8_drafts

    view = decisions.resolving_view

    class OnGpu:
        device = "cuda"

        def __init__(self, of: Any) -> None:
            self._of = of

        def __getattr__(self, name: str) -> Any:
            return getattr(self._of, name)

    for module in (decisions, fp8_drafts):
        monkeypatch.setattr(module, "resolving_view", lambda server_args: OnGpu(view(server_args)))


@pytest.mark.matrix(
    target="Step-3.5",
    draft="its own MTP layers",
    kv="any, on a GPU without fa3",
    outcome="refused",
    message="--attention-backend='triton': expected 'fa3'",
)
@pytest.mark.parametrize("flag", ["--attention-backend", "--speculative-draft-attention-backend"])
def test_a_gpus_other_attention_backends_are_refused(flag: str, checkpoint: Path, on_gpu: None) -> None:
    said = launch(checkpoint, checkpoint, flag, "triton")
    assert isinstance(said, str) and "--attention-backend='triton': expected 'fa3'" in said, said
    assert "--device" not in said


def test_a_gpu_with_flash_attention_3_is_served(checkpoint: Path, on_gpu: None) -> None:
    said = launch(checkpoint, checkpoint, "--attention-backend", "fa3")
    assert not isinstance(said, str), said


def test_dummy_weights_need_no_files(checkpoint: Path, tmp_path: Path, launcher: None) -> None:
    directory = changed(checkpoint, tmp_path / "target")
    (directory / "model.safetensors").unlink()
    said = launch(directory, directory, "--load-format", "dummy")
    assert not isinstance(said, str), said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(width={"trees": [8]}), "width trees=(8,): expected none"),
        (dict(copy="block"), "copy='block': expected none"),
        (dict(context_kv="stacked"), "context_kv='stacked': expected none"),
        (dict(draft_head="fp8"), "draft_head fp8=True: expected none"),
    ],
)
def test_settings_that_are_not_served(
    settings: dict[str, Any], message: str, checkpoint: Path, launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONFIG_ENV, json.dumps(settings))
    said = launch(checkpoint, checkpoint)
    assert isinstance(said, str) and message in said, said


def test_another_checkpoint_is_refused(checkpoint: Path, tmp_path: Path, launcher: None) -> None:
    said = launch(checkpoint, changed(checkpoint, tmp_path / "other"))
    assert isinstance(said, str) and "expected the target's own checkpoint" in said, said


def test_files_without_the_layers_are_refused(checkpoint: Path, tmp_path: Path, launcher: None) -> None:
    directory = changed(checkpoint, tmp_path / "target")
    (directory / "model.safetensors").unlink()
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: of for name, of in tensors.items() if ".6." not in name}, directory / "model.safetensors")
    said = launch(directory, directory)
    assert isinstance(said, str) and "model.layers.6.eh_proj.weight" in said, said


def test_layers_in_fp8_are_refused(checkpoint: Path, tmp_path: Path, launcher: None) -> None:
    directory = changed(checkpoint, tmp_path / "target")
    (directory / "model.safetensors").unlink()
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.5.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, directory / "model.safetensors")
    said = launch(directory, directory)
    assert isinstance(said, str) and f"tensor {name}='F8_E4M3': expected BF16" in said, said


def test_commands_that_read_a_draft_of_its_own_say_so(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    assert "multi-token-prediction layers" in str(mixed_up(config, config, same=True))


DP_ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
BUILT_IN: dict[str, tuple[tuple[str, ...], dict[str, Any], bool]] = {
    "EAGLE": (("EAGLE",), {}, True),
    "NEXTN": (("NEXTN",), {}, True),
    "another algorithm": (("EAGLE3",), {}, False),
    "a draft of its own": (("EAGLE", "--speculative-draft-model-path", "other/draft"), {}, False),
    "a flag that is not served": (("EAGLE", "--enable-streaming-session"), {}, False),
    "Step-3.5 on a GPU": (("EAGLE", "--device", "cuda"), {}, True),
    "another target": (("EAGLE",), dict(architectures=["LlamaForCausalLM"]), False),
    "no layers": (("EAGLE",), dict(num_nextn_predict_layers=None), False),
    "layers that are not served": (("EAGLE",), dict(moe_layers_enum="2,3,4,6"), False),
    "Step-3.5 with data-parallel attention": (("EAGLE", *DP_ATTENTION), {}, True),
}


@pytest.mark.parametrize("case", BUILT_IN)
def test_a_launch_with_sglangs_algorithm_is_told_of_ours_and_is_left_alone(
    case: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.server_args import prepare_server_args

    (algorithm, *flags), fields, is_told = BUILT_IN[case]
    target, seen, lines = changed(checkpoint, tmp_path / "target", **fields), list[Any](), list[str]()
    monkeypatch.setattr(hooks.logger, "info", lambda text, *of: lines.append(text % of))
    asked = prepare_server_args(
        ["--model-path", str(target), "--device", "cpu", "--speculative-algorithm", algorithm, *flags]
    )
    before = vars(asked).copy()
    hooks.handle_speculative_decoding(seen.append, asked)
    assert seen == [asked] and vars(asked) == before
    told = (
        f"--speculative-algorithm {algorithm} runs SGLang's built-in worker. With --speculative-algorithm "
        f"DFLASH --speculative-draft-model-path {target} dflash_sglang drafts with the same "
        "multi-token-prediction layers."
    )
    assert lines == ([told] if is_told else [])
