"""The plugin: what it registers, which drafts it leaves to the built-in worker, how REQUIRE ends start-up."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dflash_sglang import hooks, plugin
from dflash_sglang.checkpoint.families import _ROWS, FOREIGN_ARCHITECTURES, Foreign, foreign
from dflash_sglang.patches import apply, relay
from dflash_sglang.patches.table import PATCHES
from dflash_sglang.sglang_names import probe
from dflash_sglang.startup.facts import StartupError
from tests.support.fakes import Algorithm, BuiltInWorker, arguments, built_in
from tests.support.reference_dspark import dspark_config, dspark_tensors
from tests.support.start_up import change, fake_views
from tests.support.tiny import draft_config, make_pair, write_checkpoint

WORKER_TARGET = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
ARGUMENTS_TARGET = "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding"
CONFIG_TARGET = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        *(({"architectures": [name]}, f"architectures={name!r}") for name in FOREIGN_ARCHITECTURES),
        ({"dflash_config": {"projector_type": "eagle"}}, "dflash_config.projector_type='eagle'"),
        ({"projector_type": "eagle"}, "projector_type='eagle'"),
        ({"dflash_config": {"conv_kernel_size": 2}}, "dflash_config.conv_kernel_size=2"),
        ({"dflash_config": {"selector_rank": 256}}, "dflash_config.selector_rank=256"),
        ({"dflash_config": {"lilicorr_num_layers": 2}}, "dflash_config.lilicorr_num_layers=2"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash'"),
        ({"speculators_model_type": "domino"}, "speculators_model_type='domino'"),
        ({"speculators_config": {"algorithm": "dflash"}}, "speculators_config={'algorithm': 'dflash'}"),
        (
            {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "lstm"},
            "markov_head_type='lstm'",
        ),
    ],
    ids=str,
)
def test_a_draft_of_another_family_is_told_from_a_plain_one_by_its_field(overrides: dict, field: str) -> None:
    other = foreign(draft_config(**overrides))
    assert str(other).startswith(f"draft config {field}: ")
    assert str(other).endswith("SGLang's built-in DFlashWorkerV2 serves it, not dflash_sglang.")


def test_every_row_of_the_table_is_tested_above() -> None:
    (rows,) = (
        mark.args[1]
        for mark in test_a_draft_of_another_family_is_told_from_a_plain_one_by_its_field.pytestmark
        if mark.name == "parametrize"
    )
    named = " ".join(field for _, field in rows)
    assert all(f"{row.field}=" in named for row in _ROWS)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"final_logit_softcapping": 30.0},  # copied from a Gemma target
        {"has_embed_tokens": False, "has_lm_head": False, "sample_from_anchor": False, "shift_label": False},
        {"dflash_config": {"attention_sink_bias": False, "output_multiplier": 1.0, "conv_kernel_size": 0}},
        {"has_embed_tokens": True, "projector_type": "dflash", "dflash_config": {"attention_sink_bias": True}},
    ],
    ids=str,
)
def test_a_plain_draft_is_ours_also_where_it_spells_out_what_it_is_not(overrides: dict) -> None:
    assert foreign(draft_config(**overrides)) is None


# ---- The hooks ---------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Drafts on disk, and SGLang's views of server arguments replaced by the arguments themselves."""
    model_config = fake_views(monkeypatch)
    return SimpleNamespace(
        target=model_config,
        plain=make_pair(tmp_path / "plain")[1],
        foreign=make_pair(tmp_path / "foreign", draft={"dflash_config": {"projector_type": "eagle"}})[1],
        misfit=make_pair(tmp_path / "misfit", draft={"num_target_layers": 6})[1],
    )


LILICORR = {"architectures": ["LiLiCorrDraftModel"], "dflash_config": {"lilicorr_num_layers": 2}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dflash_config": {"projector_type": "eagle"}}, "dflash_config.projector_type='eagle'"),
        (LILICORR, "architectures='LiLiCorrDraftModel'"),
    ],
    ids=["by a field", "LiLiCorr"],
)
def test_a_foreign_draft_gets_the_built_in_worker_and_one_warning(
    pair: SimpleNamespace, caplog: pytest.LogCaptureFixture, fields: dict, named: str
) -> None:
    draft = change(pair.foreign, fields, {})
    with caplog.at_level(logging.WARNING, logger="dflash_sglang"):
        assert hooks.create_worker(built_in, Algorithm(), arguments(draft)) is BuiltInWorker
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert named in record.message and "DFlashWorkerV2" in record.message


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("return_hidden_states_mode", "full", "--enable-return-hidden-states='full'"),
        ("enable_watermark", True, "--enable-watermark=True"),
    ],
)
def test_a_feature_that_speculation_would_change_silently_is_refused(pair, field, value, flag) -> None:
    with pytest.raises(StartupError, match=f"{flag}: expected unset with DFLASH.*Remove --enable"):
        hooks.create_worker(built_in, Algorithm(), arguments(pair.plain, **{field: value}))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"speculative_draft_window_size": 4},
            "--speculative-draft-window-size=4: expected at least the block of 8",
        ),
        ({"speculative_draft_sink_size": 4}, "--speculative-draft-sink-size=4: expected 0 or more, and"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype='nvfp4': expected for the draft one of"),
        (
            {"device": "cuda", "speculative_draft_kv_cache_dtype": "fp8_e5m2", "attention_backend": "fa3"},
            "--speculative-draft-kv-cache-dtype='fp8_e5m2': expected a format that the draft's attention",
        ),
    ],
    ids=str,
)
def test_a_window_or_a_kv_format_that_cannot_be_served_ends_start_up(pair, overrides: dict, says: str) -> None:
    with pytest.raises(StartupError) as refused:
        hooks.handle_speculative_decoding(lambda args: None, arguments(pair.plain, **overrides))
    (problem,) = refused.value.problems
    assert str(problem).startswith(says)


def test_ranks_that_prefill_while_others_decode_are_refused_where_they_share_batches(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", "1")
    hooks.handle_speculative_decoding(lambda args: None, arguments(pair.plain))
    with pytest.raises(StartupError, match="SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION=True: expected unset"):
        hooks.handle_speculative_decoding(lambda args: None, arguments(pair.plain, tp_size=2, attn_dp_size=2))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"device": "npu"}, "--device='npu'"),
    ],
    ids=str,
)
def test_a_launch_outside_of_our_worker_gets_the_built_in_one_and_a_warning(
    pair: SimpleNamespace, caplog: pytest.LogCaptureFixture, overrides: dict, named: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="dflash_sglang"):
        assert hooks.create_worker(built_in, Algorithm(), arguments(pair.plain, **overrides)) is BuiltInWorker
    assert named in caplog.text and "DFlashWorkerV2" in caplog.text


def test_a_capture_that_is_named_after_dflash_runs_no_worker(pair: SimpleNamespace) -> None:
    seen: list[Any] = []
    capture = arguments(
        pair.plain,
        device="cuda",
        speculative_draft_model_path=None,
        enable_return_aux_hidden_states=True,
    )
    hooks.handle_speculative_decoding(seen.append, capture)
    assert seen == [capture]


def test_a_config_that_sglang_is_told_to_read_elsewhere_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\x80 encrypted")
    given = {"_configuration_file": "plain.json", "trust_remote_code": False}
    parsed = hooks.parse_config(lambda parser, model, **more: (model, more), None, tmp_path, **given)
    assert parsed == (tmp_path, given)


def test_other_algorithms_are_not_looked_at(pair: SimpleNamespace) -> None:
    seen = []
    assert hooks.create_worker(built_in, Algorithm(dflash=False), SimpleNamespace()) is BuiltInWorker
    hooks.handle_speculative_decoding(seen.append, other := SimpleNamespace(speculative_algorithm="EAGLE3"))
    hooks.handle_speculative_decoding(seen.append, none := SimpleNamespace(speculative_algorithm=None))
    assert seen == [other, none]


@pytest.mark.parametrize(("kind", "is_told"), [("vanilla", True), ("lstm", False)])
def test_a_launch_with_dspark_is_told_of_the_algorithm_that_serves_its_draft_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, is_told: bool
) -> None:
    config, seen = dspark_config(markov_head_type=kind), []
    draft = write_checkpoint(tmp_path / "draft", config, dspark_tensors(config))
    asked = SimpleNamespace(
        speculative_algorithm="DSPARK",
        speculative_draft_model_path=str(draft),
        speculative_draft_model_revision=None,
    )
    with caplog.at_level(logging.INFO, logger="dflash_sglang"):
        hooks.handle_speculative_decoding(seen.append, asked)
    assert seen == [asked]
    line = "With --speculative-algorithm DFLASH dflash_sglang serves this draft."
    assert (line in caplog.text) == is_told


@pytest.mark.parametrize("run", ["create_worker", "handle_speculative_decoding"])
def test_required_ends_the_process_where_the_built_in_worker_would_run(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    monkeypatch.setenv("DFLASH_SGLANG_REQUIRE", "1")
    with pytest.raises(SystemExit, match="DFLASH_SGLANG_REQUIRE=1: .*projector_type='eagle'"):
        if run == "create_worker":
            hooks.create_worker(built_in, Algorithm(), arguments(pair.foreign))
        else:
            hooks.handle_speculative_decoding(lambda args: None, arguments(pair.foreign))


@pytest.mark.parametrize("run", ["create_worker", "handle_speculative_decoding"])
def test_a_draft_that_does_not_fit_ends_start_up_in_both_processes(pair: SimpleNamespace, run: str) -> None:
    with pytest.raises(ValueError, match="num_target_layers=6: expected the target's 5 layers"):
        if run == "create_worker":
            hooks.create_worker(built_in, Algorithm(), arguments(pair.misfit))
        else:
            hooks.handle_speculative_decoding(lambda args: None, arguments(pair.misfit))


@pytest.mark.matrix(target="Llama 4, LongCat-Flash with n-grams", draft="any", kv="any", outcome="refused")
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("is_local_attention_model", "expected a target whose layers attend to the whole context or a window"),
        ("use_ngram_embedding", "expected a target that embeds tokens one by one"),
    ],
)
def test_a_target_whose_verify_is_not_its_plain_decoding_is_refused(
    pair: SimpleNamespace, kind: str, says: str
) -> None:
    setattr(pair.target, kind, True)
    with pytest.raises(StartupError, match=rf"architectures=\['Qwen3ForCausalLM'\]: {says}"):
        hooks.handle_speculative_decoding(lambda args: None, arguments(pair.plain))


def test_a_malformed_nested_config_is_named(pair: SimpleNamespace) -> None:
    path = pair.plain / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dflash_config": [1]}))
    with pytest.raises(StartupError, match=r"draft config dflash_config=\[1\]: expected an object"):
        hooks.handle_speculative_decoding(lambda args: None, arguments(pair.plain))


def test_a_missing_symbol_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import model_override_base

    monkeypatch.delitem(sys.modules, "dflash_sglang.sglang_names.launcher", raising=False)
    monkeypatch.delattr(model_override_base, "model_config_of")
    with pytest.raises(
        probe.SGLangMismatchError, match="'model_config_of' from 'sglang.srt.arg_groups.model_over"
    ):
        probe.check_symbols("dflash_sglang.sglang_names.launcher")


def test_a_misspelt_plugin_config_ends_start_up(pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_SGLANG_CONFIG", '{"context_kvs": "auto"}')
    with pytest.raises(ValueError, match="unknown key 'context_kvs'"):
        hooks.handle_speculative_decoding(lambda args: None, arguments(pair.plain))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("DFLASH_SGLANG_REQIRE", "1", "DFLASH_SGLANG_REQIRE='1': unknown variable. Known: DFLASH_SGLANG_CONFIG, "),
        ("DFLASH_SGLANG_REQUIRE", "yes", "DFLASH_SGLANG_REQUIRE='yes': expected 1 "),
    ],
)
def test_a_variable_or_a_value_that_does_not_exist_ends_start_up(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        hooks.handle_speculative_decoding(lambda args: None, arguments(pair.plain))


# ---- Activation --------------------------------------------------------------------------------------------


def test_activate_registers_an_around_hook_on_worker_arguments_configs_and_watchdogs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *args, source: registered.append((*args, source)))
    monkeypatch.setattr(apply, "_wanted", [])
    plugin.activate()
    assert {source for *_, source in registered} == {("dflash_sglang", "dflash-sglang")}  # as the log names it
    hooked = {target: (hook.__name__, kind) for target, hook, kind, _ in registered}
    assert hooked == {
        patch.target: (patch.by.rpartition(".")[2], HookType.AROUND)
        for patch in PATCHES
        if patch.process == "every"
    }
    assert {WORKER_TARGET, ARGUMENTS_TARGET, CONFIG_TARGET} < hooked.keys()


def test_activation_is_light() -> None:
    """Every SGLang process activates the plugin; only the scheduler may pay for models and kernels."""
    code = (
        "import sys, dflash_sglang.plugin; dflash_sglang.plugin.activate();"
        "heavy = ('dflash_sglang.sglang_names.scheduler', 'dflash_sglang.sglang_names.launcher', "
        "'dflash_sglang.models', 'dflash_sglang.worker', 'sglang.srt.models', 'sglang.srt.managers.scheduler');"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


BREAKAGES = {
    "SGLang has no such method": "del sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
    "a module of the package does not import": "sys.modules['dflash_sglang.checkpoint.families'] = None",
}


def load_broken_plugin(breakage: str, require: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys, sglang.srt.speculative.spec_info; {breakage}\n"
        "from sglang.srt.plugins import load_plugins; load_plugins(); print('built-in')"
    )
    environment = {**os.environ, "DFLASH_SGLANG_REQUIRE": require, "SGLANG_PLUGINS": "dflash_sglang"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES.values(), ids=BREAKAGES.keys())
def test_required_ends_every_process_whose_plugin_is_broken(breakage: str) -> None:
    done = load_broken_plugin(breakage, require="1")
    assert done.returncode == 1 and "built-in" not in done.stdout
    assert "DFLASH_SGLANG_REQUIRE=1: dflash_sglang cannot be activated" in done.stderr


@pytest.mark.slow
def test_a_broken_plugin_that_is_not_required_leaves_sglang_running() -> None:
    done = load_broken_plugin(next(iter(BREAKAGES.values())), require="0")
    assert done.returncode == 0 and "built-in" in done.stdout


def test_foreign_names_the_field_and_the_reason() -> None:
    assert str(Foreign("--device", "npu", "another device")).startswith("--device='npu': another device. ")


@pytest.mark.parametrize(
    ("mode", "lengths_on_host", "gathers"),
    [("DECODE", False, []), ("DECODE", True, ["lengths"]), ("EXTEND", False, ["lengths", "tokens"]),
     ("MIXED", False, ["lengths", "tokens"]), ("IDLE", True, ["lengths", "tokens"])],
)  # fmt: skip
def test_sglang_gathers_nothing_for_a_decode_step_but_lengths_that_a_backend_wants_on_the_host(
    mode, lengths_on_host, gathers
):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    gathered: list[str] = []
    waited = mock.Mock()
    future_map = SimpleNamespace(needs_cpu_seq_lens=lengths_on_host, publish_ready=SimpleNamespace(wait=waited))
    batch = SimpleNamespace(forward_mode=ForwardMode[mode], seq_lens_cpu=[5], seq_lens_sum=5)
    relay.resolve_seq_lens_cpu(lambda *_: gathered.append("lengths"), future_map, batch)
    relay.resolve_forward_inputs(lambda *_: gathered.append("tokens"), batch, future_map)
    assert gathered == gathers
    left = "lengths" not in gathers
    assert waited.called == left  # SGLang's own does it, too
    assert (batch.seq_lens_cpu, batch.seq_lens_sum) == ((None, None) if left else ([5], 5))
