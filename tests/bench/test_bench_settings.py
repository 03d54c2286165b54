"""`dflash-sglang bench`: its options and what they mean, prompts and random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_sglang.bench import arguments, servers, versions
from dflash_sglang.bench.settings import BadSetting, Served
from dflash_sglang.cli import main
from tests.support.bench_runs import PAIR, settings_of
from tests.support.tiny import draft_config, target_config


@pytest.mark.parametrize("options, message", [
    (["--target", "T"], "--target T: a target and its draft belong together; give --draft too"),
    (["--draft", "D"], "--draft D: a target and its draft belong together; give --target too"),
    (["--target", "no/such", "--draft", "no/such"], "--target no/such: expected the directory of a checkpoint"),
    (["--shapes", "small-moe"], "--shapes small-moe: a random target accepts next to nothing"),
    (["--shapes", "gpt", "--accept-length", "3"], "--shapes gpt: expected one of qwen3-4b, qwen3-8b"),
    (["--layers", "8"], "--layers 8: says how many layers the target of --shapes has"),
    (["--width", "32"], "--width 32: expected 2 to 16, the draft's trained block"),
    (["--width", "4", "--accept-length", "6.4"], "--accept-length 6.4: expected 1 to 4, the verify width"),
    (["--concurrency", "8", "0"], "--concurrency 0: expected at least 1"),
    (["--output", "2"], "--output 2: expected at least 8"),
    (["--top-p", "1.5"], "--top-p 1.5: expected more than 0 and at most 1"),
    (["--input", "4090"], "--input 4090 and 96 new tokens: expected at most 4096 together"),
    (["--prompts", "no.txt"], "--prompts no.txt: expected a file with prompts, or one of gsm8k, math500, "),
    (["--prompts", "no.txt", "--accept-length", "3"], "--accept-length 3: the texts mean nothing then"),
    (["--redraw", "no.json"], "--redraw no.json: expected a bench.json of an earlier run"),
    (["--redraw", "other.json"], "--redraw other.json: expected a bench.json of an earlier run (it has no fig"),
    (["--out", "other.json"], "--out other.json: expected a directory to write to"),
    (["--profile"], "--profile: takes the kernels of a GPU apart, and this machine has none"),
])  # fmt: skip
def test_settings_that_cannot_be_measured_are_refused_by_name(options, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"figures": 5}')
    pair = [] if {"--target", "--draft", "--shapes"} & set(options) else PAIR
    assert main(["bench", *options, *pair]) == 2
    assert f"dflash-sglang bench: {message}" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["other.json"]


NO_CHECKPOINT = "expected the directory of a checkpoint ("
DRAFT = json.dumps(draft_config(dflash_config={"target_layer_ids": [0, 1, 3]}))
# whose config.json, its text (None: none) or a field of it -> what is said of it
PAIRS: list[tuple[str, str | None | dict[str, object], str]] = [
    *((role, text, NO_CHECKPOINT) for role in ("target", "draft") for text in (None, "[]")),
    *(("target", {field: value}, f"target config {field}={value!r}: expected {expected}. Correct it.")
      for field, value, expected in (("vocab_size", "320", "an integer >= 1"), ("text_config", [1], "an object"),
                                     ("num_hidden_layers", 0, "an integer >= 1"))),
    ("target", DRAFT, "expected a target, and it is a DFLASH draft. Give a target."),
    ("draft", {"architectures": ["Lfm2DSparkDraftModel"]}, "draft config architectures='Lfm2DSparkDraftModel': "),
]  # fmt: skip


def test_a_pair_that_cannot_be_measured_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for number, (role, config, says) in enumerate(PAIRS):
        (directory := tmp_path / str(number)).mkdir()
        options = ["--target", *pair_of(directory, [0, 1, 3])]
        file = directory / role / "config.json"
        changed = {**json.loads(file.read_text()), **config} if isinstance(config, dict) else config
        file.unlink()
        if changed is not None:
            file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
        for command in (["bench"], ["check", "--prompts", "p"]):
            assert main([*command, *options]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"dflash-sglang {command[0]}: --{role} {directory / role}: {says}"), line


def test_the_servers_differ_in_their_worker_and_width_alone(tmp_path, monkeypatch):
    options = ["--target", *pair_of(tmp_path, [0, 1, 3]), "--width", "4", "8", "--concurrency", "1", "8"]
    options += ["--together", "--flags=--tp-size 2", "--dflash-flags=--speculative-draft-window-size 64"]
    options += ["--ours-flags=--speculative-token-map FILE"]
    monkeypatch.setenv("DFLASH_SGLANG_CONFIG", '{"draft_head": "as_is"}')  # a user's
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
    assert json.loads(ours["DFLASH_SGLANG_CONFIG"]) == {"draft_head": "as_is", "width": "block"}
    for asked, width in (([], None), (["--profile", "1"], 16), (["--accept-length", "6.4"], 16)):
        settings = settings_of(*asked, gpu=True)
        plain, ours = (servers.environment(settings, settings.served[i]) for i in (0, -1))
        assert settings.served[-1] == Served("ours", width)
        assert ("DFLASH_SGLANG_CONFIG" in ours) == bool(width)  # or it inherits a user's
        assert ("--speculative-dflash-block-size" in servers.flags(settings, settings.served[-1])) == bool(width)
    assert ours["SGLANG_SIMULATE_ACC_LEN"] == "6.4" and "SGLANG_SIMULATE_ACC_LEN" not in plain
    assert settings.sets == () and settings.inputs == (256,)
    monkeypatch.setenv("DFLASH_SGLANG_CONFIG", '{"widths": 8}')
    with pytest.raises(BadSetting, match="DFLASH_SGLANG_CONFIG"):
        settings_of()


def test_an_nvidia_smi_that_reaches_no_driver_is_no_gpu(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert versions.nvidia_smi("name") == "" and versions.versions()["gpu"] == "none"


def pair_of(tmp_path: Path, layers: list[int]) -> tuple[str, str, str]:
    """TARGET, --draft, DRAFT: a tokenizer and configs, of a target of five layers and a draft that reads those
    given."""
    config = draft_config(dflash_config={"target_layer_ids": layers})
    for name, content in (("target", target_config()), ("draft", config)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    for file in Path(PAIR[1]).glob("tokenizer*"):
        (tmp_path / "target" / file.name).symlink_to(file)
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
