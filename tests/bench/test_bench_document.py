"""`dflash-sglang bench`: its files: figures, table and plot, and what is kept of a run that failed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dflash_sglang.bench import plot, run, sweep, table
from dflash_sglang.bench.document import medians
from dflash_sglang.bench.settings import Served, Settings
from dflash_sglang.cli import main
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import ServerFailed
from tests.support.bench_runs import outcome, rows_of, settings_of


def document(**changes: Any) -> dict[str, Any]:
    rates = {
        ("plain", None): {1: 100.0, 8: 400.0}, ("built_in", 16): {1: 400.0, 8: 1000.0},
        ("ours", 8): {1: 380.0, 8: 1200.0}, ("ours", 16): {1: 500.0, 8: 1100.0},
        ("ours", None): {1: 480.0, 8: 1300.0},
    }  # fmt: skip
    figures = [
        dict(server=str(Served(kind, width)), kind=kind, width=width, concurrency=concurrency, input=None,
             prompts="talks", temperature=temperature, rounds=[*map(vars, rounds)], median=medians(rounds),
             widths={"16": 150, "8": 50, "1": 0} if (kind, width) == ("ours", None) else None)
        for temperature in (0.0, 0.7)
        for (kind, width), by_concurrency in rates.items()
        for concurrency, rate in by_concurrency.items()
        for rounds in [[outcome(rate * scale, 6.0) for scale in (0.95, 1.0, 1.1)]]
    ]  # fmt: skip
    versions = dict(gpu="NVIDIA H200, 580", dflash_sglang="1", sglang="2", torch="3")
    settings = dict(output=64, together=True, rounds=3, accept_length=None, dtype="auto")
    outputs = dict(prompts=4, new_tokens=64, equal_to_plain={"ours, width 16": 3})
    made = dict(versions=versions, date="today", target="T", draft="D", settings=settings, figures=figures)
    shares = dict(server="ours", verified=[8, 4, 1], accepted=[6, 1, 0])
    made |= dict(acceptance=[dict(shares, prompts="talks"), dict(shares, prompts="b", verified=[2], accepted=[1])])
    return {**made, "incomplete": None, "skipped": [], "sets": [], "outputs": outputs, "profile": [], **changes}


def test_the_table_has_a_row_for_each_server_and_load_with_ratios_of_the_same_load_and_width():
    text = table.markdown(document())
    titles = ["talks, greedy", "talks, temperature 0.7", "Acceptance by position"]
    assert re.findall("^## (.*)$", text, re.M) == [*titles, "Verdict, by requests at a time"]
    *rows, head, _, talks, other = rows_of(text)
    assert head == ["prompts", "server", "1", "2", "3"] and talks == ["talks", "ours", "75%", "25%", "0%"]
    assert other == ["b", "ours", "50%", "", ""]
    assert len(rows) == 2 * (2 + 10) and all(len(row) == len(table.COLUMNS) for row in rows)
    rest = ["40.0 / 60.0", "5.00 / 8.00", "6.00", "25%"]
    assert rows[2:7] == [
        ["1", "plain", "100.0 [95.0, 110.0]", "50.0", *rest[:2], "", "25%", "", "", ""],
        ["1", "built-in, width 16", "400.0 [380.0, 440.0]", "200.0", *rest, "16", "4.000", ""],
        ["1", "ours, width 8", "380.0 [361.0, 418.0]", "190.0", *rest, "8", "3.800", ""],
        ["1", "ours, width 16", "500.0 [475.0, 550.0]", "250.0", *rest, "16", "5.000", "1.250"],
        ["1", "ours", "480.0 [456.0, 528.0]", "240.0", *rest, "16: 75%, 8: 25%", "4.800", "1.200"],
    ]
    assert rows[10][-2:] == ["2.750", "1.100 ~"]  # 8 at a time, from 950 and 1045
    assert "Greedy outputs of 64 tokens equal to those without speculation, ours, width 16: 3 of 4." in text

    said = text[text.index("## Verdict, by requests at a time") :].split("\n\n")[1:]
    title = "talks, greedy, ours"
    assert said[0] == (
        f"{title}, width 8 against no speculation: faster: 3.80 times the tokens/s at 1, "
        "3.00 times the tokens/s at 8."
    )
    assert f"{title} against the built-in worker: faster: 1.20 times the tokens/s at 1, 1.30 " in said[4]
    assert said[2].endswith("against the built-in worker: faster: 1.25 times the tokens/s at 1; "
                            "not told apart: 1.10 times the tokens/s at 8.")  # fmt: skip
    assert len(said) == 2 * 5 and text.endswith(said[-1])
    one_round = document()
    one_round["settings"]["rounds"] = 1
    for figure in one_round["figures"]:
        figure["rounds"] = figure["rounds"][1:2]
    text = table.markdown(one_round)
    assert rows_of(text)[10][2:] == ["1100.0", "550.0", *rest, "16", "2.750", "1.100"]
    assert (
        "[" not in text
        and table.FIGURES in text
        and text.endswith("\n\nOne round: any difference may be chance.\n")
    )
    ours = [figure for figure in document()["figures"] if figure["kind"] == "ours"]
    assert table.markdown(document(figures=ours)).endswith("Nothing to compare: this package's server and another "
                                                           "one have no load in common.\n")  # fmt: skip


def test_the_picture_shows_throughput_and_speed_of_every_server(monkeypatch, tmp_path):
    figure_of = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []
    save = figure_of.Figure.savefig
    monkeypatch.setattr(
        figure_of.Figure, "savefig", lambda self, *a, **k: (kept.append(self), save(self, *a, **k))
    )
    measured = document(target="models/Some-8B", draft="models/Some-8B-DFlash")
    plot.draw(table.groups(measured), tmp_path / "bench.png", plot.subject(measured))
    (figure,) = kept
    assert figure.get_suptitle() == "NVIDIA H200, 580; target Some-8B, draft Some-8B-DFlash"
    by_name = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert len(by_name) == 5 and by_name["ours, width 8"] == [[1, 380.0], [8, 1200.0]]
    assert figure.axes[1].get_lines()[2].get_xydata().tolist() == [[380.0, 190.0], [1200.0, 600.0]]
    assert all(axis.get_ylim()[0] == 0 for axis in figure.axes)


def test_a_run_without_matplotlib_says_how_to_get_it_and_draws_again_from_its_figures(
    monkeypatch, tmp_path, capsys
):
    measured = tmp_path / "bench.json"
    measured.write_text(json.dumps(document()))
    monkeypatch.setattr(plot, "can_draw", lambda: False)
    assert main(["bench", "--redraw", str(measured), "--out", str(tmp_path / "again")]) == 0
    assert "pip install 'dflash_sglang[bench]'" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["bench.md"]
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert main(["bench", "--redraw", str(measured), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_float32_outputs_that_differ_fail_the_run_and_what_was_measured_before_a_failure_is_kept(
    monkeypatch, tmp_path, capsys
):
    settings, outputs, out_of_memory = settings_of("--output", "8", out=tmp_path), {}, "out of memory\nits log"

    def measured(settings: Settings, results: dict[Served, sweep.Measured], progress: Progress) -> None:
        for served, one in results.items():
            one.rounds = {cell: [outcome(10.0)] for cell in settings.cells}
            if "fails" in outputs:
                raise ServerFailed(f"ours, width 16: {out_of_memory}")
            one.outputs = outputs.get(served.kind, [[1, 2]])

    monkeypatch.setattr(sweep, "measure", measured)
    assert run.measure(settings) == 0
    outputs["ours"] = [[1, 3]]
    assert run.measure(settings) == 1
    assert "outputs differ from plain decoding: ['ours']" in capsys.readouterr().err
    outputs["fails"] = []
    with pytest.raises(ServerFailed):
        run.measure(settings)
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert [one["server"] for one in kept["figures"]] == ["plain"] * len(settings.cells)
    assert kept["incomplete"] == f"ours, width 16: {out_of_memory}" and kept["outputs"] is None
    assert "\nIncomplete: ours, width 16: out of memory\n" in (tmp_path / "bench.md").read_text()
