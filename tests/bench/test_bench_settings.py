"""`dflash-sglang bench`: its options and what they mean, prompts and random weights."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from dflash_sglang.bench import arguments, checkpoints, run, servers, versions
from dflash_sglang.bench.settings import BadSetting, Served
from dflash_sglang.cli import main
from dflash_sglang.pair import pair_directories
from tests.support.bench_runs import settings_of


@pytest.mark.parametrize("options, message", [
    (["--target", "T"], "--target T: a target and its draft belong together; give --draft too"),
    (["--draft", "D"], "--draft D: a target and its draft belong together; give --target too"),
    (["--target", "no/such", "--draft", "no/such"], "--target no/such: expected the directory of a checkpoint"),
    (["--shapes", "small-moe"], "--shapes small-moe: a random target accepts next to nothing"),
    (["--shapes", "gpt", "--accept-length", "3"], "--shapes gpt: expected one of qwen3-8b, qwen3-30b-a3b"),
    (["--layers", "8"], "--layers 8: says how many layers the target of --shapes has"),
    (["--width", "32"], "--width 32: expected 2 to 16, the draft's trained block"),
    (["--width", "4", "--accept-length", "6.4"], "--accept-length 6.4: expected 1 to 4, the verify width"),
    (["--concurrency", "8", "0"], "--concurrency 0: expected at least 1"),
    (["--output", "2"], "--output 2: expected at least 8"),
    (["--top-p", "1.5"], "--top-p 1.5: expected more than 0 and at most 1"),
    (["--input", "4090"], "--input 4090 and 96 new tokens: expected at most 4096 together"),
    (["--prompts", "no.txt"], "--prompts no.txt: expected a file with a text a line"),
    (["--prompts", "no.txt", "--accept-length", "3"], "--accept-length 3: the texts mean nothing then"),
    (["--redraw", "no.json"], "--redraw no.json: expected a bench.json of an earlier run"),
    (["--profile"], "--profile: takes the kernels of a GPU apart, and this machine has none"),
])  # fmt: skip
def test_settings_that_cannot_be_measured_are_refused_by_name(options, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *options]) == 2
    assert f"dflash-sglang bench: {message}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_results_that_cannot_be_written_end_the_run_before_it_measures(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpoints.BadSetting, match="--out .*file: expected a directory to write to"):
        run.measure(settings_of(out=tmp_path / "file"))


def test_a_checkpoint_without_a_config_that_can_be_read_is_refused_by_name(tmp_path, capsys):
    for number, (role, content) in enumerate(itertools.product(("target", "draft"), (None, "{", "[]"))):
        (directory := tmp_path / str(number)).mkdir()
        options = ["--target", *pair_of(directory, [0, 1, 3])]
        config = directory / role / "config.json"
        config.unlink()
        if content is not None:
            config.write_text(content)
        assert main(["bench", *options]) == 2
        said = capsys.readouterr().err
        assert f"bench: --{role} {directory / role}: expected the directory of a checkpoint (" in said


def test_a_field_of_the_target_that_is_no_count_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    options = ["--target", *pair_of(tmp_path, [0, 1, 3])]
    config = tmp_path / "target" / "config.json"
    fields = json.loads(config.read_text())
    for field, value, expected in (
        ("vocab_size", "320", "an integer >= 1"), ("max_position_embeddings", "many", "an integer >= 1"),
        ("num_hidden_layers", 0, "an integer >= 1"), ("text_config", [1], "an object"),
    ):  # fmt: skip
        config.write_text(json.dumps({**fields, field: value}))
        for command in (["bench"], ["check", "--prompts", "p"]):
            assert main([*command, *options]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            found = f"target config {field}={value!r}: expected {expected}. Correct it."
            assert line == f"dflash-sglang {command[0]}: --target {tmp_path / 'target'}: {found}"


def test_a_pair_that_is_mixed_up_is_refused(tmp_path, capsys):
    target, _, draft = pair_of(tmp_path, [0, 1, 3])
    assert main(["bench", "--target", draft, "--draft", target]) == 2
    assert f"--target {draft}: expected a target, and it is a DFLASH draft. Target" in capsys.readouterr().err


def test_a_file_that_no_run_wrote_is_not_drawn(tmp_path, capsys):
    for text in ("5", "[]", "{}", '{"figures": 5}'):
        (tmp_path / "other.json").write_text(text)
        assert main(["bench", "--redraw", str(tmp_path / "other.json"), "--out", str(tmp_path / "out")]) == 2
        assert "expected a bench.json of an earlier run (it has no figures)" in capsys.readouterr().err, text


def test_a_draft_that_another_worker_serves_is_refused(tmp_path):
    config = json.loads((Path(pair_directories()["draft"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Lfm2DSparkDraftModel"]}))
    with pytest.raises(checkpoints.BadSetting, match="--draft .*DSpark: a Markov head and a confidence head"):
        settings_of("--target", pair_directories()["target"], "--draft", str(tmp_path))


def test_the_servers_differ_in_their_worker_and_width_alone(tmp_path):
    options = ["--target", *pair_of(tmp_path, [0, 1, 3]), "--width", "4", "8", "--concurrency", "1", "8"]
    options += ["--together", "--flags=--tp-size 2", "--dflash-flags=--speculative-draft-window-size 64"]
    options += ["--ours-flags=--speculative-token-map FILE"]
    settings = settings_of(*options, gpu=True)
    named = {str(served): served for served in settings.served}
    assert list(named) == ["plain", "built-in, width 4", "built-in, width 8", "ours, width 4", "ours, width 8"]
    plain, built_in, ours = (servers.flags(settings, named[name]) for name in list(named)[::2])
    at = ours.index("--speculative-token-map")
    assert ours[at : at + 2] == ["--speculative-token-map", "FILE"]
    del ours[at : at + 2]
    assert built_in == ours
    assert [flag for flag in plain if flag not in ours] == []
    speculative = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", settings.draft]
    speculative += ["--speculative-dflash-block-size", "8", "--speculative-draft-window-size", "64"]
    assert ours == [*plain[:-2], *speculative, "--tp-size", "2"]
    assert plain[-2:] == ["--tp-size", "2"] and plain[plain.index("--max-running-requests") + 1] == "8"
    environments = [servers.environment(settings, named[name]) for name in ("plain", "built-in, width 8")]
    assert all(one["SGLANG_PLUGINS"] == "none" for one in environments)
    ours = servers.environment(settings, named["ours, width 8"])
    assert ours["DFLASH_SGLANG_REQUIRE"] == "1" and "SGLANG_PLUGINS" not in ours
    assert ours["DFLASH_SGLANG_CONFIG"] == '{"width": "block"}'


@pytest.mark.parametrize("options, width", [
    ([], None), (["--width", "16"], 16), (["--profile", "1"], 16), (["--accept-length", "6.4"], 16),
])  # fmt: skip
def test_our_worker_chooses_widths_unless_one_is_asked_for_a_step_taken_apart_or_acceptance_forced(options, width):
    settings = settings_of(*options, gpu=True)
    plain, ours = (settings.served[i] for i in (0, -1))
    assert (plain.kind, ours) == ("plain", Served("ours", width))
    assert ("DFLASH_SGLANG_CONFIG" in servers.environment(settings, ours)) == (width is not None)
    assert ("--speculative-dflash-block-size" in servers.flags(settings, ours)) == (width is not None)


@pytest.mark.parametrize("inherited, served", [
    ({"draft_head": "as_is"}, {"draft_head": "as_is", "width": "block"}),
    ({"width": {"memory_reserve": 1}}, {"width": {"memory_reserve": 1}}),
])  # fmt: skip
@pytest.mark.parametrize("inline", [True, False])
def test_an_inherited_config_gets_the_blocks_width_where_it_has_none(
    inherited, served, inline, monkeypatch, tmp_path
):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(inherited))
    monkeypatch.setenv("DFLASH_SGLANG_CONFIG", json.dumps(inherited) if inline else str(file))
    settings = settings_of("--width", "8")
    file.unlink()  # the report, at the end of a run, does not read it again
    ours = servers.environment(settings, Served("ours", 8))
    assert json.loads(ours["DFLASH_SGLANG_CONFIG"]) == served
    assert "DFLASH_SGLANG_CONFIG" not in servers.environment(settings, Served("built_in", 8))
    assert "DFLASH_SGLANG_CONFIG" not in servers.environment(settings, Served("ours"))  # chooses


def test_an_inherited_config_that_cannot_be_read_ends_the_run_before_it_starts_a_server(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("DFLASH_SGLANG_CONFIG", '{"widths": 8}')
    assert main(["bench", "--out", str(tmp_path / "out")]) == 2
    assert "dflash-sglang bench: DFLASH_SGLANG_CONFIG" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_nvidia_smi_that_reaches_no_driver_is_no_gpu(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert versions.nvidia_smi("name") == "" and versions.versions()["gpu"] == "none"


def test_a_forced_accept_length_reaches_the_servers_that_speculate():
    settings = settings_of("--accept-length", "6.4")
    environments = {served.kind: servers.environment(settings, served) for served in settings.served}
    assert environments["ours"]["SGLANG_SIMULATE_ACC_LEN"] == "6.4"
    assert "SGLANG_SIMULATE_ACC_LEN" not in environments["plain"]
    assert settings.prompts == () and settings.inputs == (256,)


def pair_of(tmp_path: Path, layers: list[int]) -> tuple[str, str, str]:
    """TARGET, --draft, DRAFT: configs alone, of a target of five layers and a draft that reads those given."""
    from tests.support.tiny import draft_config, target_config

    config = draft_config(dflash_config={"target_layer_ids": layers})
    for name, content in (("target", target_config()), ("draft", config)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    return str(tmp_path / "target"), "--draft", str(tmp_path / "draft")


def test_the_built_in_worker_is_left_out_with_a_reason_where_it_cannot_run(tmp_path):
    last = "it cannot capture the output of the target's last layer, which the draft reads"
    without = "without this package SGLang serves no DFLASH on a CPU"
    for layers, gpu, reason in (([0, 1, 3], True, None), ([0, 1, 4], True, last), ([0, 1, 3], False, without)):
        (directory := tmp_path / f"{layers[-1]}{gpu}").mkdir()
        settings = settings_of("--target", *pair_of(directory, layers), "--together", gpu=gpu)
        assert settings.skipped == (() if reason is None else (("built_in", reason),))
        assert ("built_in" in settings.kinds) == (reason is None)


@pytest.mark.parametrize("free, together", [(140_000, True), (60_000, False)])
def test_servers_run_together_where_their_weights_fit(free, together, monkeypatch, tmp_path):
    monkeypatch.setattr(arguments, "nvidia_smi", lambda fields: f"141000\n{free}")
    target, _, draft = pair_of(tmp_path, [0, 1, 3])
    for directory, gigabytes in ((target, 16), (draft, 2)):
        with (Path(directory) / "model.safetensors").open("wb") as file:
            file.truncate(gigabytes << 30)  # sparse
    settings = settings_of("--target", target, "--draft", draft, gpu=True)
    # 1.25 * (16 + 18 + 18) + 3 * 8
    assert settings.together_reason == f"about 89 GiB for 3 servers, {free / 1024:.0f} GiB free on a GPU"
    assert settings.together == together
    assert settings.mem_fraction == (0.7 if together else None)


def test_chat_without_a_template_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        shutil.copytree(pair_directories()[name], tmp_path / name)
    (tmp_path / "target" / "chat_template.jinja").unlink()
    options = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--chat"]
    with pytest.raises(BadSetting, match="--chat: expected a target with a chat template.*Leave out --chat"):
        settings_of(*options)
    assert settings_of("--chat").chat  # the packaged target has one
