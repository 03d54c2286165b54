"""`dflash-sglang bench`: its options, its proof of which worker ran, its figures and files, and a run on a CPU."""

from __future__ import annotations

import gzip
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang import __version__
from dflash_sglang.bench import (
    arguments,
    checkpoints,
    kinds,
    load,
    plot,
    profile,
    prompts,
    random_pair,
    run,
    servers,
    sweep,
    table,
    trace,
)
from dflash_sglang.bench.document import medians
from dflash_sglang.bench.load import LoadFailed, Outcome
from dflash_sglang.bench.settings import Cell, Served, Settings
from dflash_sglang.cli import _parser, main
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Server, ServerFailed
from dflash_sglang.pair import pair_directories
from tests import engines
from tests.test_demo import SERVES, wait_until_ended

OURS_LINE = f"[12:00:00] dflash_sglang {__version__} worker active: draft=x"
BUILT_IN_LINE = "[12:00:00] Initialized DFLASH draft runner. attention_backend=fa3"
# As SGLang's launcher logs a scheduler that could not start.
FAILED = """
print("[12:00:01] Scheduler hit an exception: Traceback (most recent call last):")
print('  File "scheduler.py", line 1, in run')
print("RuntimeError: Not enough memory; increase --mem-fraction-static")
print("[12:00:02] Received sigquit from a child process")
raise SystemExit(1)
"""


def settings_of(*options: str, gpu: bool = False, out: Path = Path("out")) -> Settings:
    parsed = _parser().parse_args(["bench", "--out", str(out), *options])
    return arguments.settings_of(parsed, gpu, say=lambda text: None)


# Options


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


def test_a_draft_that_another_worker_serves_is_refused(tmp_path):
    config = json.loads((Path(pair_directories()["draft"]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3DSparkModel"]}))
    with pytest.raises(checkpoints.BadSetting, match="--draft .*DSpark: a Markov head"):
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


def test_a_forced_accept_length_reaches_the_servers_that_speculate():
    settings = settings_of("--accept-length", "6.4")
    environments = {served.kind: servers.environment(settings, served) for served in settings.served}
    assert environments["ours"]["SGLANG_SIMULATE_ACC_LEN"] == "6.4"
    assert "SGLANG_SIMULATE_ACC_LEN" not in environments["plain"]
    assert settings.prompts == () and settings.inputs == (256,)


def pair_of(tmp_path: Path, layers: list[int]) -> tuple[str, str, str]:
    """TARGET, --draft, DRAFT: configs alone, of a target of five layers and a draft that reads those given."""
    from tests.tiny import draft_config, target_config

    config = draft_config(dflash_config={"target_layer_ids": layers})
    for name, content in (("target", target_config()), ("draft", config)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    return str(tmp_path / "target"), "--draft", str(tmp_path / "draft")


@pytest.mark.parametrize("layers, gpu, reason", [
    ([0, 1, 3], True, None),
    ([0, 1, 4], True, "it cannot capture the output of the target's last layer, which the draft reads"),
    ([0, 1, 3], False, "without this package SGLang serves no DFLASH on a CPU"),
])  # fmt: skip
def test_the_built_in_worker_is_left_out_with_a_reason_where_it_cannot_run(layers, gpu, reason, tmp_path):
    settings = settings_of("--target", *pair_of(tmp_path, layers), "--together", gpu=gpu)
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


def test_a_prompt_of_a_length_ends_with_its_text():
    settings = settings_of("--input", "1500")
    made = prompts.contexts(settings, 1500, 3)
    for prompt, text in zip(made, prompts.contexts(settings, None, 3), strict=True):
        assert len(prompt.encode()) == 1500  # the pair's tokens are bytes
        assert prompt.endswith(text + "\n")
    assert len(set(made)) == 3


def test_a_random_target_has_a_word_for_each_of_its_tokens(tmp_path):
    from transformers import AutoTokenizer

    random_pair.write_words(tmp_path, 151936)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.vocab_size == 151936
    ids = [0, 7, 151935, 7]
    assert tokenizer.decode(ids) == "w0 w7 w151935 w7" and tokenizer.encode("w0 w7 w151935 w7") == ids


# Which worker ran


@pytest.mark.parametrize("kind, log, verb", [
    ("plain", "", None), ("plain", BUILT_IN_LINE, "has"), ("plain", OURS_LINE, "has"),
    ("built_in", BUILT_IN_LINE, None), ("built_in", "", "lacks"), ("built_in", OURS_LINE, "lacks"),
    ("ours", OURS_LINE, None), ("ours", "", "lacks"), ("ours", BUILT_IN_LINE, "has"),
    ("ours", OURS_LINE.replace(__version__, "0.0.1"), "lacks"),
])  # fmt: skip
def test_a_log_proves_one_kind_of_worker(kind, log, verb):
    if verb is None:
        kinds.assert_worker(kind, log)
    else:
        with pytest.raises(ServerFailed, match=f"{kind}: another worker runs than expected, the log {verb} "):
            kinds.assert_worker(kind, log)


class Fake(Server):
    """Runs `program` in place of SGLang, as every server of a run; knows the processes it started."""

    program = ""
    pids: list[int] = []

    def __init__(self, command: list[str], **rest: Any):
        port = command[command.index("--port") + 1]
        super().__init__([sys.executable, "-c", self.program, port], **rest)

    def __enter__(self) -> Server:
        super().__enter__()
        self.pids.append(self.process.pid)
        return self


@pytest.fixture
def fake(monkeypatch):
    """The class of the servers that a run starts; no load generator is imported."""
    monkeypatch.setattr(servers, "Server", Fake)
    monkeypatch.setattr(load, "generator", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(Fake, "pids", [])
    return Fake


def test_a_run_ends_where_another_worker_answers(fake, tmp_path, capsys):
    fake.program = f"print({BUILT_IN_LINE!r}, flush=True)\n{SERVES}"
    assert main(["bench", "--out", str(tmp_path), "--servers", "ours"]) == 1
    error = capsys.readouterr().err
    assert f"the log has {kinds.SIGNATURE['built_in']!r} ({tmp_path}/logs/ours_16.log)" in error
    assert wait_until_ended(fake.pids) == [] and len(fake.pids) == 1
    assert not (tmp_path / "bench.json").exists()


def test_a_server_that_does_not_start_is_reported_by_its_own_error(fake, tmp_path, capsys):
    fake.program = FAILED
    assert main(["bench", "--out", str(tmp_path)]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    log = tmp_path / "logs" / "plain.log"
    assert lines[0] == (
        f"dflash-sglang bench: plain: RuntimeError: Not enough memory; increase --mem-fraction-static ({log})"
    )
    assert lines[-1] == "where memory is short, --in-turn runs one server at a time"
    assert "Received sigquit" in log.read_text()


def test_a_server_that_dies_under_load_is_named_with_its_error(fake, monkeypatch, tmp_path, capsys):
    fake.program = f"print({OURS_LINE!r}, flush=True)\n{SERVES}"

    def refused(server: Server, *_: Any) -> None:
        with server.log.open("a") as log:
            log.write("Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory\n")
        raise LoadFailed("1 of 4 requests failed")

    monkeypatch.setattr(load, "run", refused)
    assert main(["bench", "--out", str(tmp_path), "--servers", "ours"]) == 1
    first, second = capsys.readouterr().err.strip().splitlines()[:2]
    assert first == "dflash-sglang bench: ours, width 16: 1 of 4 requests failed"
    assert second == "torch.OutOfMemoryError: CUDA out of memory"
    assert wait_until_ended(fake.pids) == []


def test_ctrl_c_ends_the_servers_and_says_so(fake, monkeypatch, tmp_path, capsys):
    fake.program = SERVES

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "run", interrupted)
    assert main(["bench", "--out", str(tmp_path), "--servers", "plain"]) == 130
    assert capsys.readouterr().err.endswith("interrupted, servers ended\n")
    grandchild = int((tmp_path / "logs" / "plain.log").read_text().split()[1])
    assert wait_until_ended([*fake.pids, grandchild]) == []


# Figures


def answer(tokens: int, accept_length: float) -> SimpleNamespace:
    return SimpleNamespace(output_len=tokens, spec_accept_length=accept_length)


RESULT = dict(
    errors=["", ""], completed=2, output_throughput=100.0, median_tpot_ms=4.0, median_ttft_ms=30.0,
    median_itl_ms=3.5, duration=0.41,
)  # fmt: skip


def test_an_outcome_counts_the_steps_of_the_load_and_none_of_the_warm_up():
    found = load.outcome(RESULT, [answer(8, 8.0), answer(25, 5.0), answer(16, 4.0)], speculative=True)
    # 41 tokens, of which the prefills gave two, in 5 + 4 steps
    assert found == Outcome(100.0, 250.0, 30.0, 3.5, 39 / 9, 2, 41, 0.41)
    assert load.outcome(RESULT, [answer(8, 0.0)] * 3, speculative=False).accept_length == 1.0


def test_a_load_with_a_failed_request_gives_no_outcome():
    with pytest.raises(LoadFailed, match="1 of 2 requests failed; the first: .'Bad Request: too long'"):
        load.outcome({**RESULT, "errors": ["", "Bad Request: too long"], "completed": 1}, [], speculative=True)


def outcome(rate: float, accept_length: float = 1.0) -> Outcome:
    return Outcome(rate, rate / 2, 40.0, 5.0, accept_length, 4, 64, 1.0)


def document(**changes: Any) -> dict[str, Any]:
    rates = {
        ("plain", None): {1: 100.0, 8: 400.0}, ("built_in", 16): {1: 400.0, 8: 1000.0},
        ("ours", 8): {1: 380.0, 8: 1200.0}, ("ours", 16): {1: 500.0, 8: 1100.0},
    }  # fmt: skip
    figures = [
        dict(server=str(Served(kind, width)), kind=kind, width=width, concurrency=concurrency, input=None,
             temperature=temperature, rounds=[],
             median=medians([outcome(rate * scale, 6.0) for scale in (0.5, 1.0, 1.1)]))
        for temperature in (0.0, 0.7)
        for (kind, width), by_concurrency in rates.items()
        for concurrency, rate in by_concurrency.items()
    ]  # fmt: skip
    versions = dict(gpu="NVIDIA H200, 580", dflash_sglang="1", sglang="2", torch="3")
    settings = dict(output=64, together=True, rounds=3, accept_length=None, dtype="auto")
    outputs = dict(prompts=4, new_tokens=64, equal_to_plain={"ours, width 16": 3})
    made = dict(versions=versions, date="today", target="T", draft="D", settings=settings, figures=figures)
    return {**made, "incomplete": None, "skipped": [], "outputs": outputs, "profile": [], **changes}


def rows_of(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_a_row_for_each_server_and_load_with_ratios_of_the_same_load_and_width():
    text = table.markdown(document())
    assert re.findall("^## (.*)$", text, re.M) == [
        "texts as they are, greedy",
        "texts as they are, temperature 0.7",
    ]
    rows = rows_of(text)
    assert len(rows) == 2 * (2 + 8) and all(len(row) == len(table.COLUMNS) for row in rows)
    assert rows[2] == ["1", "plain", "100.0", "50.0", "40.0", "5.00", "", "", ""]
    assert rows[3] == ["1", "built-in, width 16", "400.0", "200.0", "40.0", "5.00", "6.00", "4.000", ""]
    assert rows[4] == ["1", "ours, width 8", "380.0", "190.0", "40.0", "5.00", "6.00", "3.800", ""]
    assert rows[5] == ["1", "ours, width 16", "500.0", "250.0", "40.0", "5.00", "6.00", "5.000", "1.250"]
    assert rows[9][-2:] == ["2.750", "1.100"]  # 8 at a time
    assert "Greedy outputs of 64 tokens equal to those without speculation, ours, width 16: 3 of 4." in text


def test_the_plot_shows_throughput_and_speed_by_concurrency():
    panels = plot.series(document())
    assert list(panels) == ["texts as they are, greedy", "texts as they are, temperature 0.7"]
    assert panels["texts as they are, greedy"]["ours, width 8"] == dict(
        kind="ours", concurrency=[1, 8], tokens_per_second=[380.0, 1200.0], user_tokens_per_second=[190.0, 600.0]
    )
    assert len(panels["texts as they are, greedy"]) == 4


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


def test_float32_outputs_that_differ_fail_the_run(monkeypatch, tmp_path, capsys):
    settings = settings_of("--output", "8", out=tmp_path)
    outputs = {}

    def measured(settings: Settings, results: dict[Served, sweep.Measured], progress: Progress) -> None:
        for served, one in results.items():
            one.outputs = outputs.get(served.kind, [[1, 2]])
            one.rounds = {cell: [outcome(10.0)] for cell in settings.cells}

    monkeypatch.setattr(sweep, "measure", measured)
    assert run.measure(settings) == 0
    outputs["ours"] = [[1, 3]]
    assert run.measure(settings) == 1
    assert "outputs differ from plain decoding: ['ours, width 16']" in capsys.readouterr().err


def test_what_was_measured_before_a_failure_is_kept_and_called_incomplete(monkeypatch, tmp_path):
    settings = settings_of("--concurrency", "1", out=tmp_path)

    def fails(settings: Settings, results: dict[Served, sweep.Measured], progress: Progress) -> None:
        results[settings.served[0]].rounds = {cell: [outcome(10.0)] for cell in settings.cells}
        raise ServerFailed("ours, width 16: out of memory\nits log")

    monkeypatch.setattr(sweep, "measure", fails)
    with pytest.raises(ServerFailed):
        run.measure(settings)
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert [one["server"] for one in measured["figures"]] == ["plain"]
    assert measured["incomplete"] == "ours, width 16: out of memory\nits log" and measured["outputs"] is None
    assert "\nIncomplete: ours, width 16: out of memory\n" in (tmp_path / "bench.md").read_text()


# A step taken apart


def kernel(
    start: float, length: float, correlation: int, name: str = "gemm", cat: str = "kernel"
) -> dict[str, Any]:
    return dict(ph="X", cat=cat, name=name, ts=start, dur=length, args=dict(correlation=correlation))


def steps(count: int) -> list[dict[str, Any]]:
    """Of 200 us each: a verify graph of 10 kernels, a draft graph of 4, a graph of one, and three launches outside
    of graphs, two of them at once and one beside the draft."""
    events = []
    for step in range(count):
        at, launch = 200.0 * step, 10 * step
        verify = [kernel(at + 10 * i, 9, launch) for i in range(10)]
        draft = [kernel(at + 120 + 5 * i, 5, launch + 1) for i in range(4)]
        events += [*verify, *draft, kernel(at + 160, 2, launch + 2, "one")]
        events += [dict(ph="X", cat="cuda_runtime", name="cudaGraphLaunch", ts=at - 50, dur=1,
                        args=dict(correlation=launch + i)) for i in range(3)]  # fmt: skip
        events += [
            kernel(at + 105, 5, launch + 3, "copy", "gpu_memcpy"),
            kernel(at + 108, 6, launch + 4, "accept"),
        ]
        events += [kernel(at + 130, 20, launch + 5, "fill")]
        events += [dict(ph="X", cat="cpu_op", name="aten::copy_", ts=at, dur=3), dict(ph="i", name="mark", ts=at)]
    return events


@pytest.fixture
def trace_file(tmp_path):
    path = tmp_path / "1763-TP-0.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": steps(3)[::-1]}, file)
    return path


def test_a_trace_is_split_into_verify_draft_other_kernels_and_gaps(trace_file):
    step = trace.read(trace_file)
    assert step.steps == 2
    assert step.step_ms == pytest.approx(0.2)
    assert step.verify_ms == pytest.approx(0.090)
    assert step.draft_ms == pytest.approx(0.020)
    assert step.other_graphs_ms == pytest.approx(0.002)
    assert step.outside_ms == pytest.approx(0.019)  # 105 to 114, and 140 to 150: beside the draft is the draft's
    assert step.gaps_ms == pytest.approx(0.069) and step.gaps_in_graphs_ms == pytest.approx(0.009)
    assert step.idle == pytest.approx(0.345)
    assert step.kernels == {"verify": 10, "draft": 4, "other_graphs": 1, "outside": 3}
    assert step.outside_kernels == [("fill", 1, 20), ("accept", 1, 6), ("copy", 1, 5)]
    assert step.verify_span_ms == pytest.approx(0.099)  # 10 kernels and the gaps between them
    assert step.graph_kernels == {
        "verify": [("gemm", 10, 90)], "draft": [("gemm", 4, 20)], "other_graphs": [("one", 1, 2)],
    }  # fmt: skip


def test_the_split_is_printed_with_shares_that_sum_up(trace_file):
    step = trace.read(trace_file)
    text = table.step_table({"server": "ours, width 16", "concurrency": 8, **vars(step), "idle": step.idle})
    assert text.startswith("## A step of ours, width 16, 8 at a time\n\n0.200 ms, average of 2 steps;")
    assert "the GPU is idle for 34.5%." in text
    rows = rows_of(text)
    assert rows[2] == ["verify graph", "0.090", "45.0%", "10.0"]
    assert sum(float(row[1]) for row in rows[2:8]) == pytest.approx(0.2)
    assert rows[-1] == ["`copy`", "1.0", "5.0"]


@pytest.mark.parametrize("recorded", [4, 9])
def test_a_verify_graph_that_the_profile_began_in_is_no_step(recorded):
    begun = [kernel(10 * i - 200, 9, -1) for i in range(10 - recorded, 10)]
    assert trace.step_of([*begun, *steps(4)]) == trace.step_of(steps(4))


@pytest.mark.parametrize("events, lacks", [
    ([dict(cat="cpu_op", name="aten::mm", ts=0, dur=1)], "no kernel of a GPU"),
    ([kernel(10 * i, 5, i) for i in range(9)], "0 launches of a verify graph"),
    (steps(1), "1 launches of a verify graph"),
])  # fmt: skip
def test_a_trace_without_whole_steps_says_what_it_lacks(events, lacks):
    with pytest.raises(trace.TraceError, match=lacks):
        trace.step_of(events)


def test_a_trace_is_read_when_it_is_whole(trace_file):
    whole = trace_file.read_bytes()
    trace_file.write_bytes(whole[:-20])
    with pytest.raises(trace.TraceError, match="no complete trace"):
        profile.wait_for_trace(trace_file.parent, Progress(io.StringIO()), timeout=0)
    trace_file.write_bytes(whole)
    path, step = profile.wait_for_trace(trace_file.parent, Progress(io.StringIO()), timeout=0)
    assert path == trace_file and step.steps == 2


# All of it


@pytest.mark.slow
def test_the_packaged_pair_is_measured_on_a_cpu_with_and_without_dflash(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(servers, "Server", engines._ForkedServer)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sweep, "COMPARED_TOKENS", 24)
    profiled = profiles_of_cpu_servers(monkeypatch)
    options = ["--concurrency", "1", "2", "--rounds", "1", "--output", "24", "--requests", "2"]
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
        assert median["requests"] == 4 and median["output_tokens"] == 4 * 24
        assert all(value > 0 for value in median.values())
        assert median["output_tokens_per_second"] == pytest.approx(96 / median["seconds"])
        assert (2 < median["accept_length"] < 16) if one["kind"] == "ours" else median["accept_length"] == 1
    # Nothing but the texts decides how much is accepted, and both loads have the same.
    lengths = [one["median"]["accept_length"] for one in measured["figures"] if one["kind"] == "ours"]
    assert lengths[0] == pytest.approx(lengths[1])
    assert measured["outputs"] == {"prompts": 4, "new_tokens": 64, "equal_to_plain": {"ours, width 16": 4}}

    rows = rows_of((tmp_path / "bench.md").read_text())
    assert [row[:2] for row in rows[2:]] == [
        ["1", "plain"], ["1", "ours, width 16"], ["2", "plain"], ["2", "ours, width 16"],
    ]  # fmt: skip
    assert rows[3][6] == f"{lengths[0]:.2f}" and float(rows[3][7]) > 0
    assert "built-in: not run, without this package" in printed.out
    assert (tmp_path / "bench.png").exists() == plot.can_draw() != (plot.MISSING in printed.out)
    assert profiled == ["the trace has no kernel of a GPU"] * 2


def profiles_of_cpu_servers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has every server of the run profiled as well: SGLang's trace arrives, and what it lacks is noted."""
    monkeypatch.setattr(profile, "PROFILED_TOKENS", 128)
    monkeypatch.setattr(profile, "STEPS", 2)
    monkeypatch.setattr(profile, "ACTIVITIES", ["CPU"])
    outputs, noted = sweep._outputs, []

    def and_profile(settings: Settings, served: Served, server: Server, progress: Progress) -> list[list[int]]:
        with pytest.raises(trace.TraceError) as error:
            asked = prompts.requests(settings, None, 2)
            profile.take_apart(server, str(served), asked, settings.out / "traces", progress)
        noted.append(str(error.value))
        return outputs(settings, served, server, progress)

    monkeypatch.setattr(sweep, "_outputs", and_profile)
    return noted


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


def test_cells_are_swept_by_temperature_input_and_concurrency():
    options = ["--temperature", "0", "0.7", "--input", "64", "128", "--concurrency", "1", "4"]
    cells = settings_of(*options).cells
    assert cells[:3] == [Cell(1, 64, 0.0), Cell(4, 64, 0.0), Cell(1, 128, 0.0)] and len(cells) == 8
