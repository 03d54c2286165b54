"""The plugin: what it registers, which drafts it leaves to the built-in worker, how REQUIRE ends start-up."""

from __future__ import annotations

import json
import logging
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
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from dflash_sglang.sglang_names import probe
from dflash_sglang.startup.facts import StartupError
from tests.support.fakes import Algorithm, BuiltInWorker, arguments, built_in
from tests.support.reference_dspark import dspark_config, dspark_tensors
from tests.support.start_up import change, fake_views
from tests.support.tiny import draft_config, make_pair, write_checkpoint

# Fields of drafts of other families, and how each is named.
FOREIGN: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"architectures": [name]}, f"architectures={name!r}") for name in FOREIGN_ARCHITECTURES),
    ({"dflash_config": {"projector_type": "eagle"}}, "dflash_config.projector_type='eagle'"),
    ({"projector_type": "eagle"}, "projector_type='eagle'"),
    ({"dflash_config": {"conv_kernel_size": 2}}, "dflash_config.conv_kernel_size=2"),
    ({"dflash_config": {"selector_rank": 256}}, "dflash_config.selector_rank=256"),
    ({"dflash_config": {"lilicorr_num_layers": 2}}, "dflash_config.lilicorr_num_layers=2"),
    ({"speculators_model_type": "domino"}, "speculators_model_type='domino'"),
    ({"speculators_config": {"algorithm": "dflash"}}, "speculators_config={'algorithm': 'dflash'}"),
    ({"architectures": ["Qwen3DSparkModel"], "markov_head_type": "lstm"}, "markov_head_type='lstm'"),
)
PLAIN: tuple[dict[str, Any], ...] = (  # also where it spells out what it is not
    {},
    {"final_logit_softcapping": 30.0},  # copied from a Gemma target
    {"has_embed_tokens": False, "has_lm_head": False, "sample_from_anchor": False, "shift_label": False},
    {"dflash_config": {"attention_sink_bias": False, "output_multiplier": 1.0, "conv_kernel_size": 0}},
    {"has_embed_tokens": True, "projector_type": "dflash", "dflash_config": {"attention_sink_bias": True}},
)


def test_a_draft_of_another_family_is_told_from_a_plain_one_by_its_field() -> None:
    for overrides, field in FOREIGN:
        other = str(foreign(draft_config(**overrides)))
        assert other.startswith(f"draft config {field}: "), overrides
        assert other.endswith("SGLang's built-in DFlashWorkerV2 serves it, not dflash_sglang.")
    named = " ".join(field for _, field in FOREIGN)
    assert all(f"{row.field}=" in named for row in _ROWS)
    assert [foreign(draft_config(**overrides)) for overrides in PLAIN] == [None] * len(PLAIN)
    assert str(Foreign("--device", "npu", "another device")).startswith("--device='npu': another device. ")


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


def decide(run: str, args: Any) -> Any:
    """What the launcher's hook, or the scheduler's, makes of a launch."""
    if run == "create_worker":
        return hooks.create_worker(built_in, Algorithm(), args)
    return hooks.handle_speculative_decoding(lambda args: None, args)


def test_what_we_do_not_serve_gets_the_built_in_worker_and_one_warning(pair, caplog) -> None:
    lilicorr = {"architectures": ["LiLiCorrDraftModel"], "dflash_config": {"lilicorr_num_layers": 2}}
    for named, draft, fields, overrides in (
        ("dflash_config.projector_type='eagle'", pair.foreign, {}, {}),
        ("architectures='LiLiCorrDraftModel'", pair.foreign, lilicorr, {}),
        ("--device='npu'", pair.plain, {}, {"device": "npu"}),
    ):
        change(draft, fields, {})
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="dflash_sglang"):
            assert decide("create_worker", arguments(draft, **overrides)) is BuiltInWorker
        (record,) = caplog.records
        assert record.levelname == "WARNING" and named in record.message and "DFlashWorkerV2" in record.message


# Flags, variables of the environment, facts of the target, and what start-up says of them.
COORDINATED = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"
E5M2 = dict(device="cuda", speculative_draft_kv_cache_dtype="fp8_e5m2", attention_backend="fa3")
# fmt: off
REFUSED: tuple[tuple[dict[str, Any], dict[str, str], str, str], ...] = (
    (dict(speculative_draft_window_size=4), {}, "",
     "--speculative-draft-window-size=4: expected at least the block of 8"),
    (dict(speculative_draft_sink_size=4), {}, "", "--speculative-draft-sink-size=4: expected 0 or more, and"),
    (dict(kv_cache_dtype="nvfp4"), {}, "", "--kv-cache-dtype='nvfp4': expected for the draft one of"),
    (E5M2, {}, "", "--speculative-draft-kv-cache-dtype='fp8_e5m2': expected a format that the draft's attention"),
    (dict(tp_size=2, attn_dp_size=2), {COORDINATED: "1"}, "", f"{COORDINATED}=True: expected unset"),
    ({}, {}, "is_local_attention_model",
     "architectures=['Qwen3ForCausalLM']: expected a target whose layers attend to the whole context or a window"),
    ({}, {}, "use_ngram_embedding",
     "architectures=['Qwen3ForCausalLM']: expected a target that embeds tokens one by one"),
    ({}, {CONFIG_ENV: '{"context_kvs": "auto"}'}, "", "unknown key 'context_kvs'"),
    ({}, {"DFLASH_SGLANG_REQIRE": "1"}, "",
     "DFLASH_SGLANG_REQIRE='1': unknown variable. Known: DFLASH_SGLANG_CONFIG, "),
    ({}, {"DFLASH_SGLANG_REQUIRE": "yes"}, "", "DFLASH_SGLANG_REQUIRE='yes': expected 1 "),
)
# fmt: on


@pytest.mark.matrix(target="Llama 4, LongCat-Flash with n-grams", draft="any", kv="any", outcome="refused")
def test_a_launch_that_cannot_work_ends_by_the_name_of_what_is_wrong(pair: SimpleNamespace) -> None:
    for flags, variables, of_target, says in REFUSED:
        with pytest.MonkeyPatch.context() as monkeypatch:
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            if of_target:
                monkeypatch.setattr(pair.target, of_target, True)
            with pytest.raises((StartupError, ValueError)) as refused:
                pytest.fail(f"{says}: {decide('handle_speculative_decoding', arguments(pair.plain, **flags))}")
            assert says in str(refused.value)
            assert len(getattr(refused.value, "problems", "1")) == 1, says
    with pytest.MonkeyPatch.context() as monkeypatch:  # of batches that ranks do not share
        monkeypatch.setenv(COORDINATED, "1")
        decide("handle_speculative_decoding", arguments(pair.plain))


@pytest.mark.parametrize("run", ["create_worker", "handle_speculative_decoding"])
def test_both_processes_refuse_a_draft_that_does_not_fit_and_where_we_are_required_another_worker(
    pair: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    with pytest.raises(ValueError, match="num_target_layers=6: expected the target's 5 layers"):
        decide(run, arguments(pair.misfit))
    monkeypatch.setenv("DFLASH_SGLANG_REQUIRE", "1")
    with pytest.raises(SystemExit, match="DFLASH_SGLANG_REQUIRE=1: .*projector_type='eagle'"):
        decide(run, arguments(pair.foreign))
    path = pair.plain / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dflash_config": [1]}))
    with pytest.raises(StartupError, match=r"draft config dflash_config=\[1\]: expected an object"):
        decide(run, arguments(pair.plain))


def test_other_algorithms_and_captures_that_are_named_after_dflash_are_not_looked_at(
    pair: SimpleNamespace,
) -> None:
    named = dict(device="cuda", speculative_draft_model_path=None, enable_return_aux_hidden_states=True)
    others = [SimpleNamespace(speculative_algorithm=name) for name in ("EAGLE3", None)]
    seen: list[Any] = []
    for asked in (launches := [arguments(pair.plain, **named), *others]):
        hooks.handle_speculative_decoding(seen.append, asked)
    assert seen == launches
    assert hooks.create_worker(built_in, Algorithm(dflash=False), SimpleNamespace()) is BuiltInWorker


def test_a_config_that_sglang_is_told_to_read_elsewhere_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\x80 encrypted")
    given = {"_configuration_file": "plain.json", "trust_remote_code": False}
    parsed = hooks.parse_config(lambda parser, model, **more: (model, more), None, tmp_path, **given)
    assert parsed == (tmp_path, given)


def test_a_launch_with_dspark_is_told_of_the_algorithm_that_serves_its_draft_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dflash_sglang")
    for kind, is_told in (("vanilla", True), ("lstm", False)):
        config, seen = dspark_config(markov_head_type=kind), []
        draft = dict(speculative_draft_model_revision=None, speculative_draft_model_path=str(tmp_path / kind))
        write_checkpoint(tmp_path / kind, config, dspark_tensors(config))
        caplog.clear()
        hooks.handle_speculative_decoding(
            seen.append, asked := SimpleNamespace(speculative_algorithm="DSPARK", **draft)
        )
        line = "With --speculative-algorithm DFLASH dflash_sglang serves this draft."
        assert seen == [asked] and (line in caplog.text) == is_told


def test_a_missing_symbol_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import model_override_base

    monkeypatch.delitem(sys.modules, "dflash_sglang.sglang_names.launcher", raising=False)
    monkeypatch.delattr(model_override_base, "model_config_of")
    named = "'model_config_of' from 'sglang.srt.arg_groups.model_over"
    with pytest.raises(probe.SGLangMismatchError, match=named):
        probe.check_symbols("dflash_sglang.sglang_names.launcher")


# ---- Activation --------------------------------------------------------------------------------------------


def test_activate_registers_an_around_hook_for_each_patch_of_every_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registered = []
    monkeypatch.setattr(HookRegistry, "register", lambda *args, source: registered.append((*args, source)))
    monkeypatch.setattr(apply, "_wanted", [])
    plugin.activate()
    assert {source for *_, source in registered} == {("dflash_sglang", "dflash-sglang")}  # as the log names it
    hooked = {(target, hook.__name__, kind) for target, hook, kind, _ in registered}
    wanted = [patch for patch in PATCHES if patch.process == "every"]
    assert hooked == {(patch.target, patch.by.rpartition(".")[2], HookType.AROUND) for patch in wanted}


# Prints a line of each of its children: what activation imports, and how it ends in processes that have SGLang.
PROCESSES = """
import os, sys

def in_a_child(code, **environment):
    if os.fork() == 0:
        os.environ.update(environment)
        try:
            exec(code)
        except SystemExit as end:
            print(str(end).partition("\\n")[0])
        sys.stdout.flush()
        os._exit(0)
    os.wait()

in_a_child(LIGHT)
import sglang.srt.speculative.spec_info
for broken, require in BROKEN:
    in_a_child(
        broken + "; from sglang.srt.plugins import load_plugins; load_plugins(); print('built-in')",
        DFLASH_SGLANG_REQUIRE=require, SGLANG_PLUGINS="dflash_sglang",
    )
"""
HEAVY = ("dflash_sglang.sglang_names.scheduler", "dflash_sglang.sglang_names.launcher", "dflash_sglang.models",
         "dflash_sglang.worker", "sglang.srt.models", "sglang.srt.managers.scheduler")  # fmt: skip
LIGHT = (
    f"import dflash_sglang.plugin; dflash_sglang.plugin.activate(); "
    f"print([name for name in sys.modules if name.startswith({HEAVY})])"
)
NO_METHOD = "del sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
NO_IMPORT = "sys.modules['dflash_sglang.checkpoint.families'] = None"


@pytest.mark.slow
def test_activation_is_light_and_ends_every_process_whose_plugin_is_broken_where_it_is_required() -> None:
    """Every SGLang process activates the plugin; only the scheduler may pay for models and kernels."""
    broken = [(NO_METHOD, "1"), (NO_IMPORT, "1"), (NO_METHOD, "0")]
    program = f"LIGHT, BROKEN = {LIGHT!r}, {broken}\n{PROCESSES}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    imported, *ended, without = done.stdout.splitlines()
    assert (imported, without) == ("[]", "built-in"), done.stderr[-2000:]
    said = "DFLASH_SGLANG_REQUIRE=1: dflash_sglang cannot be activated"
    assert len(ended) == 2 and all(line.startswith(said) for line in ended)


def test_sglang_gathers_nothing_for_a_decode_step_but_lengths_that_a_backend_wants_on_the_host() -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    for mode, lengths_on_host, gathers in (
        ("DECODE", False, []),
        ("DECODE", True, ["lengths"]),
        *((mode, False, ["lengths", "tokens"]) for mode in ("EXTEND", "MIXED", "IDLE")),
    ):
        gathered: list[str] = []
        ready = SimpleNamespace(wait=(waited := mock.Mock()))
        future_map = SimpleNamespace(needs_cpu_seq_lens=lengths_on_host, publish_ready=ready)
        batch = SimpleNamespace(forward_mode=ForwardMode[mode], seq_lens_cpu=[5], seq_lens_sum=5)
        relay.resolve_seq_lens_cpu(lambda *_, to=gathered: to.append("lengths"), future_map, batch)
        relay.resolve_forward_inputs(lambda *_, to=gathered: to.append("tokens"), batch, future_map)
        left = "lengths" not in gathers
        assert gathered == gathers and waited.called == left, mode  # SGLang's own waits, too
        assert (batch.seq_lens_cpu, batch.seq_lens_sum) == ((None, None) if left else ([5], 5))
