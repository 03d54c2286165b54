"""`bench.serve` and `bench.load`: claims, what a run leaves that ended, times of a load."""

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
from dflash_sglang.demo.launch import BUILT_IN, OURS
from dflash_sglang.pair import pair_directories

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


def test_the_built_in_worker_is_refused_on_a_cpu(monkeypatch, capsys):
    options = ON_CPU[: ON_CPU.index("--kinds")]
    for program in (serve, step_profile, startup):
        command_line(monkeypatch, *options, "--out", "FILE", "--kinds", OURS, BUILT_IN)
        with pytest.raises(SystemExit):
            program.main()
        assert "--kinds ours built_in: without this package SGLang serves no DFLASH" in capsys.readouterr().err
