"""`bench.serve`, `bench.step_profile`, `bench.startup`: claims, what a run leaves that ended, runs on a CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from bench import serve, servers, startup, step_profile
from bench.load import Answer, Load, Outcome, ask, by_figure, decode_seconds, run
from dflash_sglang.bench import profile, trace
from dflash_sglang.demo import launch
from dflash_sglang.demo.launch import BUILT_IN, OURS
from dflash_sglang.demo.server import Server
from dflash_sglang.pair import pair_directories
from tests.support import engines
from tests.support.bench_runs import steps

ON_CPU = [
    "--target", pair_directories()["target"], "--draft", pair_directories()["draft"], "--device", "cpu",
    "--token-ids", "5", "200", "--input", "16", "--mem-fraction", "0.3", "--kinds", OURS,
    "--flags=--sleep-on-idle --skip-server-warmup",
]  # fmt: skip


def command_line(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *options])


def values(claimed: list[dict[str, Any]]) -> list[tuple[float, str, bool]]:
    return [(one["value"], one["bound"], one["ok"]) for one in claimed]


def test_serve_keeps_each_concurrency_that_it_has_measured(monkeypatch, tmp_path):
    out = tmp_path / "serve.json"

    def measure(servers: Any, arguments: Namespace, concurrency: int) -> dict[str, Any]:
        if concurrency == 32:
            raise RuntimeError("the server is gone")
        return {"greedy": {OURS: by_figure([Outcome(1, 6, 9.0)]), BUILT_IN: by_figure([Outcome(1, 6, 10.0)])}}

    monkeypatch.setattr(serve, "measure", measure)
    monkeypatch.setattr(servers, "together", lambda *_, **__: contextlib.nullcontext({}))
    command_line(monkeypatch, "--target", "T", "--draft", "D", "--out", str(out), "--concurrency", "1", "32")
    with pytest.raises(RuntimeError, match="the server is gone"):
        serve.main()
    written = json.loads(out.read_text())
    assert list(written["figures"]) == ["1"] and values(written["claims"]) == [(0.9, "<= 1.03", True)]


def test_variants_of_ours_have_flags_of_their_own_and_are_held_against_the_built_in_worker():
    variant = serve._variant("fp8=--fp8 --x '1 2'")
    assert (variant.name, variant.kind, variant.flags) == ("ours_fp8", OURS, ("--fp8", "--x", "1 2"))
    step = {OURS: 9.0, BUILT_IN: 10.0, variant.name: 8.0}
    figures = {"32": {"greedy": {name: {"step_ms": [ms]} for name, ms in step.items()}}}
    claimed = serve.claims(figures, 1.0, 1.05, {("greedy", "32"): 0.85})
    assert [one["what"].split(" at ")[1] for one in claimed] == [
        "concurrency 32, median of rounds",
        "concurrency 32, median of rounds, fp8",
    ]
    assert values(claimed) == [(0.9, "<= 0.85", False), (0.8, "<= 0.85", True)]


def test_ours_is_held_against_variants_with_variables_of_their_own():
    variant = serve._variant("whole=PYTHONPATH=/x DFLASH_SGLANG_CONFIG='{\"a\": 1}' --fp8 A=1")
    assert variant.environment == {"PYTHONPATH": "/x", "DFLASH_SGLANG_CONFIG": '{"a": 1}'}
    assert (variant.name, variant.flags) == ("ours_whole", ("--fp8", "A=1"))
    figures = {"1": {"greedy": {OURS: {"step_ms": [9.9]}, variant.name: {"step_ms": [9.0]}}}}
    [claimed] = serve.claims(figures, 1.0, 1.05, {}, variant_bound=1.005)
    assert claimed["what"] == "greedy step time over that of whole at concurrency 1, median of rounds"
    assert values([claimed]) == [(1.1, "<= 1.005", False)]


class Stub:
    """A server that gives a request its first token at once, and when as many are there as come at a time the
    rest of all, in 5 steps of 10 ms."""

    def __init__(self, at_a_time: int) -> None:
        self.arrived, self.lock = [], threading.Lock()
        self.all_there = threading.Barrier(at_a_time)

    def post(self, path: str) -> None:
        self.flushed = path

    def stream(self, input_ids: list[int], sampling_params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert sampling_params["stream_interval"] == sampling_params["max_new_tokens"] == 31
        with self.lock:
            self.arrived.append(input_ids)
        yield {"meta_info": {}}
        self.all_there.wait(10)
        time.sleep(0.05)
        yield {"meta_info": {"completion_tokens": 31, "spec_verify_ct": 5}}


def test_a_step_is_timed_from_when_all_of_a_wave_have_their_first_token():
    load = Load(4, 8, 16, 31, waves=True)
    stub = Stub(4)
    outcome = run(stub, load)
    assert (len(stub.arrived), outcome.accept_length, stub.flushed) == (8, 6.2, "/flush_cache?timeout=60")
    assert {tuple(ids) for ids in stub.arrived[:4]} == {tuple(ids) for ids in load.prompts()[:4]}
    assert 10 <= outcome.step_ms < 20
    answers = ask(Stub(4), dataclasses.replace(load, pause=0.2))
    assert min(answer.asked for answer in answers[4:]) >= 0.2 + max(answer.last for answer in answers[:4])
    wave = [Answer(asked=0.0, first=1.0, last=5.0, tokens=31, verify_steps=5), Answer(0.0, 3.0, 6.0, 31, 5)]
    assert (decode_seconds(wave, wave=True), decode_seconds(wave, wave=False)) == (5.0, 7.0)


def test_a_load_ends_with_the_reason_of_a_request_that_failed():
    class InOnePiece(Stub):
        def stream(self, **request: Any) -> Iterator[dict[str, Any]]:
            yield list(super().stream(**request))[-1]

    with pytest.raises(RuntimeError, match="1 of 1 requests failed on URL: an answer came in one piece"):
        server = InOnePiece(1)
        server.url = "URL"
        ask(server, Load(1, 1, 16, 31))


def profiled(step_ms: float, verify_span_ms: float, outside: float, idle: float = 0.015) -> dict[str, Any]:
    """What `take_apart` gives, of a step as long as that."""
    return {
        "concurrency": 1, "steps": 11, "step_ms": step_ms, "verify_span_ms": verify_span_ms, "idle": idle,
        "gaps_ms": 0.02 * step_ms, "gaps_in_graphs_ms": 0.015 * step_ms,
        "kernels": {"verify": 600.0, "outside": outside}, "trace": "FILE",
        "outside_kernels": [("copy", 2.0, 3.14159)],
        "graph_kernels": {"verify": [(f"{'gemm' * 100}", 36.0, 4000 + step_ms)], "draft": [], "other_graphs": []},
    }  # fmt: skip


def test_what_is_not_verify_is_our_step_less_the_built_in_workers_verify_graph():
    rounds = {
        BUILT_IN: [profiled(6.7, 5.5, 39), profiled(6.8, 5.4, 39), profiled(6.75, 5.3, 39)],
        # A longer verify graph of ours, with what the built-in worker does elsewhere, takes nothing off.
        OURS: [profiled(6.5, 5.9, 3), profiled(6.3, 5.9, 9, idle=0.03), profiled(6.2, 5.9, 3)],
        step_profile.WITH_MAP: [profiled(6.3, 5.9, 9)] * 3,
    }
    figures = {name: step_profile.figures_of(of) for name, of in rounds.items()}
    bounds = Namespace(outside=8, idle=0.02, beyond_verify=1.0, beyond_verify_token_map=0.85)
    assert step_profile.beyond_verify(figures) == {BUILT_IN: 1.35, OURS: 0.9, step_profile.WITH_MAP: 0.9}
    of_one = step_profile.claims({"1": figures}, bounds)
    assert values(of_one) == [
        (3, "<= 8", True), (9, "<= 8", False), (0.015, "<= 0.02", True), (0.9, "<= 1.0", True),
        (0.9, "<= 0.85", False),
    ]  # fmt: skip
    assert "the built-in worker's own: 1.35" in of_one[-1]["what"]
    assert "the kernels of a graph: 0.005)" in of_one[2]["what"]
    assert step_profile.claims({"32": figures}, bounds) == [
        {**one, "what": one["what"].replace("concurrency 1", "concurrency 32")} for one in of_one[:2]
    ]
    # In turn ours may come first: what needs the built-in worker waits for it.
    assert len(step_profile.claims({"1": {OURS: figures[OURS]}}, bounds)) == 2
    [name, count, microseconds] = figures[OURS]["kernels_by_name"]["verify"][0]
    assert (len(name), count, microseconds) == (step_profile.KERNEL_NAME, 36, 4006.3)  # the round of the median


@pytest.mark.release
@pytest.mark.slow
def test_steps_of_our_worker_are_profiled_with_a_token_map_and_without(monkeypatch, tmp_path, capsys):
    """On a CPU, where the trace that SGLang writes has no kernel: those of a made-up one stand for them."""
    monkeypatch.setattr(launch, "Server", engines._ForkedServer)
    monkeypatch.setattr(profile, "PROFILED_TOKENS", 1500)  # longer than it takes to ask for a profile
    monkeypatch.setattr(profile, "STEPS", 2)
    monkeypatch.setattr(profile, "ACTIVITIES", ["CPU"])
    read = []

    def of_made_up(path: Any) -> trace.Step:
        with pytest.raises(trace.TraceError, match="no kernel of a GPU"):
            actual_read(path)
        read.append(path.parent.name)
        return trace.step_of(steps(3))

    actual_read = trace.read
    monkeypatch.setattr(trace, "read", of_made_up)
    out = tmp_path / "step_profile.json"
    options = ["--out", str(out), "--logs", str(tmp_path / "logs"), "--rounds", "2", "--concurrency", "1"]
    command_line(monkeypatch, *ON_CPU, *options, "--token-map-size", "64")
    assert step_profile.main() == 1  # of the made-up step 34.5% is idle
    written = json.loads(out.read_text())
    names = [OURS, step_profile.WITH_MAP]
    assert [(at, list(of)) for at, of in written["figures"].items()] == [("1", names)]
    assert all(len(one["rounds"]) == 2 for of in written["figures"].values() for one in of.values())
    assert read == [f"{name}_1_{turn}" for turn, order in enumerate((names, names[::-1])) for name in order]
    assert [one["value"] for one in written["claims"]] == [3, 3, 0.345]
    logs = {name: (tmp_path / "logs" / f"{name}.log").read_text() for name in names}
    assert ["head: 64 tokens" in log for log in logs.values()] == [False, True]
    assert "## A step of ours_token_map, 1 at a time" in capsys.readouterr().out


def test_the_built_in_worker_is_refused_on_a_cpu(monkeypatch, capsys):
    options = ON_CPU[: ON_CPU.index("--kinds")]
    for program in (serve, step_profile, startup):
        command_line(monkeypatch, *options, "--out", "FILE", "--kinds", OURS, BUILT_IN)
        with pytest.raises(SystemExit):
            program.main()
        assert "--kinds ours built_in: without this package SGLang serves no DFLASH" in capsys.readouterr().err


def started(ready_s: float, first: float) -> dict[str, float]:
    return dict(ready_s=ready_s, first_over_settled=first)


def test_claims_of_start_up_are_of_the_rounds_that_all_servers_have_been_through():
    figures = {
        OURS: {
            "greedy": [started(40, 1.0), started(44, 1.3), started(41, 1.05), started(900, 9.0)],
            "sampled": [started(41, 1.2), started(43, 1.2), started(42, 1.0)],
        },
        BUILT_IN: {"greedy": [started(40, 2.0)] * 3, "sampled": [started(40, 2.0)] * 3},
    }
    expected = [(1.0375, "<= 1.0", False), (1.05, "<= 1.1", True), (1.2, "<= 1.1", False)]
    assert values(startup.claims(figures, 1.0, 1.1)) == expected
    assert values(startup.claims(figures, 1.05, 1.1))[0] == (1.0375, "<= 1.05", True)
    figures[BUILT_IN]["sampled"] = []
    assert startup.claims(figures, 1.0, 1.1) == []


@pytest.mark.release
@pytest.mark.slow
def test_each_sampling_has_a_server_of_its_own_whose_first_requests_are_timed(monkeypatch, tmp_path, capsys):
    begun, actual_ask = [], startup.ask

    class Counted(engines._ForkedServer):
        ready_path = "/health"

        def __enter__(self) -> Server:
            begun.append([])
            return super().__enter__()

    def ask(server: Counted, load: Load) -> list[Answer]:
        begun[-1].append(load.temperature)
        return actual_ask(server, load)

    monkeypatch.setattr(launch, "Server", Counted)
    monkeypatch.setattr(startup, "ask", ask)
    monkeypatch.setattr(startup, "PAUSE", 0.05)
    out = tmp_path / "startup.json"
    options = ["--out", str(out), "--rounds", "1", "--output", "61", "--max-running-requests", "2"]
    command_line(monkeypatch, *ON_CPU, *options, "--bound", "1", "--first-bound", "1000")
    assert startup.main() == 0
    assert begun == [[0.0, 0.7], [0.0], [0.7]]  # the first one is uncounted
    written = json.loads(out.read_text())
    assert list(written["figures"][OURS]) == ["greedy", "sampled"]
    for [start] in written["figures"][OURS].values():
        assert start["ready_s"] > 0 and len(start["latency_ms"]) == 10
        assert start["verify_steps"] == [10] * 10  # of 60 tokens after the first, 6 at a time
    assert len(written["claims"]) == 2
