"""A target's own multi-token-prediction layers as the draft: what is read of them, and refused launches."""

from __future__ import annotations

import json
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
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from dflash_sglang.sglang_names.launcher import draft_model_config_of, resolving_view
from tests.support.start_up import hook_launcher, resolved, tells
from tests.zoo import step3p5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return step3p5.write(tmp_path_factory.mktemp("mtp") / "target")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    hook_launcher(monkeypatch)
    original = ModelConfig._config_draft_model
    monkeypatch.setattr(ModelConfig, "_config_draft_model", lambda of: hooks.config_draft_model(original, of))


def changed(checkpoint: Path, directory: Path, **fields: Any) -> Path:
    """The checkpoint with other fields of its config.json; None removes one."""
    directory.mkdir()
    config = {**json.loads((checkpoint / "config.json").read_text()), **fields}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (directory / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    return directory


def test_what_is_read(checkpoint: Path, launcher: None) -> None:
    served = resolved(checkpoint, checkpoint)
    assert not isinstance(served, str), served
    assert resolving_view(served).speculative_num_draft_tokens == step3p5.MTP_LAYERS + 1
    config = read_config(checkpoint)
    spec = MtpSpec.from_config(config)
    assert holds_mtp(config) and "multi-token-prediction layers" in str(mixed_up(config, config, same=True))
    assert (spec.num_layers, spec.num_target_layers, spec.block_size) == (3, 5, 4)
    assert [(layer.kind, layer.window) for layer in spec.layers] == [("sliding_attention", 25)] * 3
    assert [spec.draft_rows(width) for width in (2, 3, 4)] == [4, 4, 4]
    assert "layers.5." in spec.prefix(0)
    assert spec.reach == 2 * 4 + 25


FULL, SLIDING = step3p5.FULL, step3p5.SLIDING
TARGET = step3p5.TYPES[: step3p5.LAYERS]


@pytest.mark.parametrize(("types", "flags", "groups"), [
    ([*TARGET, SLIDING, FULL, SLIDING], (), ([1], [0, 2])),
    ([*TARGET, SLIDING, FULL, SLIDING], ("--disable-hybrid-swa-memory",), None),
    ([SLIDING] * 8, (), None),
])  # fmt: skip
def test_sliding_layers_are_a_kv_group_where_the_targets_are(
    types: list[str], flags: tuple[str, ...], groups: Any, tmp_path: Path, launcher: None
) -> None:
    target = step3p5.write(tmp_path / "target", types)
    served = resolved(target, target, *flags)
    assert not isinstance(served, str), served
    read = draft_model_config_of(served, str(target))
    assert read.is_hybrid_swa == (groups is not None)
    if groups is not None:
        assert (read.full_attention_layer_ids, read.swa_attention_layer_ids) == groups


GROUPS = dict(num_attention_heads=6, num_attention_groups=1, head_dim=16)
NO_WAY = "Serve this target without --speculative-algorithm DFLASH."
FIELDS: list[tuple[dict[str, Any], str]] = [
    (dict(num_nextn_predict_layers=None), "num_nextn_predict_layers=0: expected an integer >= 1"),
    (dict(layer_types=step3p5.TYPES[:5]), "layer_types=[ ... expected a value for each of 5 layers and 3"),
    (dict(moe_layers_enum="2,3,4,6"), f"moe_layers_enum=[6]: expected no multi-token-prediction layer with "
     f"experts. {NO_WAY}"),
    (dict(attention_other_setting=GROUPS), f"attention_other_setting.num_attention_groups=1: expected "
     f"num_attention_groups=2: SGLang's KV pools of this target have one number of heads. {NO_WAY}"),
    (dict(quantization_config=dict(quant_method="fp8")), "quantization_config={'quant_method': 'fp8'}: expected "
     "none: multi-token-prediction layers are read in the model's dtype. Serve the unquantised checkpoint, or"),
]  # fmt: skip


def test_fields_that_are_not_served(checkpoint: Path) -> None:
    for fields, says in FIELDS:
        config = {key: value for key, value in {**read_config(checkpoint), **fields}.items() if value is not None}
        with pytest.raises(DraftConfigError) as caught:
            MtpSpec.from_config(config)
        assert tells(str(caught.value), f"draft config {says}"), caught.value


WITH = "with multi-token-prediction layers as the draft"
UNSET = f"expected unset with DFLASH: {WITH}"
QUANT = "--speculative-draft-model-quantization"
LAUNCHES: list[tuple[str, str]] = [
    ("--enable-mixed-chunk", f"--enable-mixed-chunk=True: {UNSET} a step commits a block, or a prompt's tokens."),
    ("--enable-streaming-session", f"--enable-streaming-session=True: {UNSET} it is not tested. Remove"),
    ("--enable-lora --max-lora-rank 8 --lora-target-modules q_proj", f"--enable-lora=True: {UNSET} it is not"),
    ("--disaggregation-mode prefill", "--disaggregation-mode='prefill': expected 'null' with DFLASH: ... hidden"),
    ("--speculative-num-draft-tokens 3", "--speculative-num-draft-tokens=3: expected 4: the last token and a "
     "proposal of each of 3 layers. Leave it out."),
    ("--speculative-dflash-block-size 8", "--speculative-dflash-block-size=8: expected 4"),
    ("--speculative-draft-window-size 64", f"--speculative-draft-window-size=64: {UNSET} windows are the layers'"),
    ("--kv-cache-dtype fp8_e4m3", f"--kv-cache-dtype='fp8_e4m3': expected 'auto' with DFLASH: {WITH} it is not"),
    (f"{QUANT} fp8", f"{QUANT}='fp8': {UNSET} weights are in the model's dtype. Remove {QUANT}, or"),
    ('--json-model-override-args {"rms_norm_eps":1e-6}', "--json-model-override-args= ... config.json is read as"),
]  # fmt: skip


def test_launches_that_are_not_served(checkpoint: Path, launcher: None) -> None:
    for flags, says in LAUNCHES:
        said = resolved(checkpoint, checkpoint, *flags.split())
        assert isinstance(said, str) and any(tells(line, says) for line in said.splitlines()), (flags, said)


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
    said = resolved(checkpoint, checkpoint, flag, "triton")
    assert isinstance(said, str) and "--attention-backend='triton': expected 'fa3'" in said, said
    assert "--device" not in said
    assert not isinstance(resolved(checkpoint, checkpoint, "--attention-backend", "fa3"), str)


def test_settings_that_are_not_served(checkpoint: Path, launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, says in (
        (dict(width={"trees": [8]}), "width trees=(8,)"),
        (dict(copy="block"), "copy='block'"),
        (dict(context_kv="stacked"), "context_kv='stacked'"),
        (dict(draft_head="fp8"), "draft_head fp8=True"),
    ):
        monkeypatch.setenv(CONFIG_ENV, json.dumps(settings))
        assert resolved(checkpoint, checkpoint) == f"{CONFIG_ENV} {says}: expected none {WITH}. Leave it out."


def test_other_checkpoints_and_files_are_refused(checkpoint: Path, tmp_path: Path, launcher: None) -> None:
    path, other = "--speculative-draft-model-path", changed(checkpoint, tmp_path / "other")
    own = "the target's own checkpoint, whose multi-token-prediction layers are the draft"
    assert resolved(checkpoint, other) == f"{path}='{other}': expected {own}. Give it the path of --model-path."
    tensors, fp8 = load_file(checkpoint / "model.safetensors"), "model.layers.5.mlp.up_proj.weight"
    (other / "model.safetensors").unlink()
    assert not isinstance(resolved(other, other, "--load-format", "dummy"), str)
    save_file({name: of for name, of in tensors.items() if ".6." not in name}, other / "model.safetensors")
    files = "safetensors files with model.layers.6.eh_proj.weight, of a multi-token-prediction layer"
    assert resolved(other, other) == f"{path}='{other}': expected {files}. Serve a checkpoint that holds them."
    save_file({**tensors, fp8: tensors[fp8].to(torch.float8_e4m3fn)}, other / "model.safetensors")
    assert resolved(other, other) == f"tensor {fp8}='F8_E4M3': expected BF16, F16 or F32. {NO_WAY}"


DP_ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
BUILT_IN: list[tuple[tuple[str, ...], dict[str, Any], bool]] = [
    (("EAGLE",), {}, True),
    (("NEXTN", "--device", "cuda", *DP_ATTENTION), {}, True),
    (("EAGLE3",), {}, False),
    (("EAGLE", "--speculative-draft-model-path", "other/draft"), {}, False),
    (("EAGLE", "--enable-streaming-session"), {}, False),
    (("EAGLE",), dict(architectures=["LlamaForCausalLM"]), False),
    (("EAGLE",), dict(moe_layers_enum="2,3,4,6"), False),
]  # fmt: skip


def test_a_launch_with_sglangs_algorithm_is_told_of_ours_and_is_left_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.server_args import prepare_server_args

    seen, lines = list[Any](), list[str]()
    monkeypatch.setattr(hooks.logger, "info", lambda text, *of: lines.append(text % of))
    for number, ((algorithm, *flags), fields, is_told) in enumerate(BUILT_IN):
        target = changed(checkpoint, tmp_path / str(number), **fields)
        command = ["--model-path", str(target), "--device", "cpu", "--speculative-algorithm", algorithm, *flags]
        before = vars(asked := prepare_server_args(command)).copy()
        lines.clear()
        hooks.handle_speculative_decoding(seen.append, asked)
        assert seen[-1] is asked and vars(asked) == before
        told = (
            f"--speculative-algorithm {algorithm} runs SGLang's built-in worker. With --speculative-algorithm "
            f"DFLASH --speculative-draft-model-path {target} dflash_sglang drafts with the same "
            "multi-token-prediction layers."
        )
        assert lines == ([told] if is_told else []), (algorithm, flags, fields)
