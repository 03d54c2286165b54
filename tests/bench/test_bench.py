"""`dflash-sglang bench` from start to end: the packaged pair on a CPU and on a GPU."""

from __future__ import annotations

import json

import pytest

from dflash_sglang import __version__
from dflash_sglang.bench import plot, sweep
from dflash_sglang.cli import main
from dflash_sglang.demo import launch
from tests.support import engines
from tests.support.bench_runs import rows_of


@pytest.mark.release
@pytest.mark.slow
def test_the_packaged_pair_is_measured_on_a_cpu_with_and_without_dflash(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(launch, "Server", engines._ForkedServer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sweep, "COMPARED_TOKENS", 24)
    options = ["--concurrency", "1", "2", "--rounds", "1", "--output", "24", "--requests", "2", "--width", "16"]
    code = main(["bench", "--out", str(tmp_path), *options, "--flags=--skip-server-warmup"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    measured = json.loads((tmp_path / "bench.json").read_text())

    assert [one["server"] for one in measured["servers"]] == ["plain", "ours, width 16"]
    assert (
        measured["servers"][1]["worker"].split("] ")[-1].startswith(f"dflash_sglang {__version__} worker active")
    )
    assert measured["servers"][0]["worker"] == ""
    assert measured["skipped"] == [
        {"kind": "built_in", "reason": "without this package SGLang serves no DFLASH on a CPU"}
    ]
    assert measured["incomplete"] is None
    assert measured["versions"]["sglang"] == "0.5.23" and measured["settings"]["together"] is True
    assert [(one["server"], one["concurrency"]) for one in measured["figures"]] == [
        ("plain", 1), ("plain", 2), ("ours, width 16", 1), ("ours, width 16", 2),
    ]  # fmt: skip
    for one in measured["figures"]:
        assert len(one["rounds"]) == 1 and one["rounds"][0] == one["median"]
        median = one["median"]
        assert median["requests"] == 4 and 8 < median["output_tokens"] <= 4 * 24
        assert all(value > 0 for name, value in median.items() if name != "cached_share")
        assert median["output_tokens_per_second"] == pytest.approx(median["output_tokens"] / median["seconds"])
        assert (1 < median["accept_length"] < 16) if one["kind"] == "ours" else median["accept_length"] == 1
    # Nothing but the texts decides how much is accepted, and both loads have the same.
    lengths = [one["median"]["accept_length"] for one in measured["figures"] if one["kind"] == "ours"]
    assert lengths[0] == pytest.approx(lengths[1])
    assert measured["outputs"] == {"prompts": 4, "new_tokens": 24, "equal_to_plain": {"ours, width 16": 4}}

    assert [one["prompts"] for one in measured["acceptance"]] == ["held-out prompts"]
    rows = rows_of((tmp_path / "bench.md").read_text())[:6]
    assert [row[:2] for row in rows[2:]] == [
        ["1", "plain"], ["1", "ours, width 16"], ["2", "plain"], ["2", "ours, width 16"],
    ]  # fmt: skip
    assert rows[3][6] == f"{lengths[0]:.2f}" and rows[3][8] == "16" and float(rows[3][9].rstrip(" ~")) > 0
    assert "built-in: not run, without this package" in printed.out
    assert (tmp_path / "bench.png").exists() == plot.can_draw() != (plot.MISSING in printed.out)


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu_a_step_of_the_packaged_pair_is_taken_apart(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SGLANG_PLATFORM", "")
    options = ["--concurrency", "1", "4", "--rounds", "1", "--output", "64", "--profile", "4"]
    assert main(["bench", "--out", str(tmp_path), *options]) == 0, capsys.readouterr().err
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert [one["server"] for one in measured["servers"]] == ["plain", "ours, width 16"]
    lengths = [one["median"]["accept_length"] for one in measured["figures"] if one["kind"] == "ours"]
    assert all(length > 3 for length in lengths)
    [step] = measured["profile"]
    assert step["server"] == "ours, width 16" and step["steps"] >= 6
    parts = ("verify_ms", "draft_ms", "other_graphs_ms", "outside_ms", "gaps_ms")
    assert sum(step[part] for part in parts) == pytest.approx(step["step_ms"])
    assert step["verify_ms"] > step["draft_ms"] > 0 and 0 <= step["idle"] < 0.9
    assert step["kernels"]["verify"] > step["kernels"]["draft"] > 10
    assert sum(launches for _, launches, _ in step["outside_kernels"]) == pytest.approx(step["kernels"]["outside"])
    assert "## A step of ours, width 16, 4 at a time" in (tmp_path / "bench.md").read_text()
