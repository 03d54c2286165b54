"""`bench.recurrent`, `bench.first_batches`, `bench.running_requests`, `bench.draft_kv`: claims, runs on a CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import draft_kv, first_batches, recurrent, running_requests
from bench.load import Answer, Load, Outcome
from dflash_sglang.bench import random_pair
from dflash_sglang.demo import launch
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from tests.support import engines

NAMES = [OURS, PLAIN, BUILT_IN, "ours_16", "ours_8"]


def rounds(*rates: float) -> dict[str, list[float]]:
    return {"by_steps": list(rates)}


def values(claimed: list[dict[str, Any]]) -> list[tuple[float, str, bool]]:
    return [(one["value"], one["bound"], one["ok"]) for one in claimed]


def test_ours_is_held_against_the_best_fixed_width_or_plain_and_against_the_built_in_worker():
    of_32 = {OURS: rounds(96, 10, 300), PLAIN: rounds(50, 50, 50), BUILT_IN: rounds(64, 65, 64)}
    of_32 |= {"ours_16": rounds(60, 60, 60), "ours_8": rounds(100, 99, 100)}
    of_64 = {**of_32, PLAIN: rounds(90, 192, 90)}
    claimed = recurrent.claims({"32": of_32, "64": of_64}, NAMES)
    assert values(claimed) == [(0.96, ">= 0.97", False), (1.5, ">= 1.5", True), (0.96, ">= 0.97", False)]
    assert "plain, ours_8" in claimed[0]["what"] and "3 rounds" in claimed[0]["what"]
    # Of a round that was broken off, nothing counts; nothing is claimed of a load that somebody lacks.
    of_32[OURS]["by_steps"].append(1)
    assert recurrent.claims({"32": of_32, "1": {OURS: rounds(9)}}, NAMES) == claimed[:2]


def test_tokens_are_counted_at_the_accept_length_of_the_long_run(monkeypatch):
    counted = iter([{"16": 10, "1": 0}, {"16": 40, "1": 10}])

    def told(server: Any) -> dict[str, Any]:
        steps = next(counted)
        return {"steps": steps, "probes": dict.fromkeys(steps, 0), "seconds": steps}

    asked: list[tuple[Load, float]] = []
    monkeypatch.setattr(recurrent, "told", told)
    monkeypatch.setattr(recurrent, "occupy", lambda server, load, seconds: asked.append((load, seconds)))
    monkeypatch.setattr(recurrent, "watch", lambda *_: Outcome(1000.0, 5.0, 7.0))
    load = Load(8, 1)
    ours = recurrent.measure(None, OURS, load, 6.0)
    assert asked == [(load, recurrent.WARM_UP)]
    assert ours["by_width"] == {"16": [30, 0, 30], "1": [10, 0, 10]}
    assert ours["by_steps"] == pytest.approx(1000 * (3 * 6.42 + 1) / 4 / 5, rel=0.001)
    built_in = recurrent.measure(None, BUILT_IN, load, 6.0)
    assert built_in["by_steps"] == pytest.approx(1000 * 6.42 / 5, rel=0.001) and "by_width" not in built_in


class Started:
    """A server that has room for seven requests."""

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def get(self, path: str) -> Any:
        return {"internal_states": [{"effective_max_running_requests_per_dp": 7}]}


def test_rounds_that_are_added_go_on_with_the_order_of_those_that_are_there(monkeypatch, tmp_path, capsys):
    begun, out = [], tmp_path / "recurrent.json"
    monkeypatch.setattr(recurrent, "server_of", lambda *_, **__: Started())
    monkeypatch.setattr(recurrent, "wait_for", lambda kind, server: begun.append(kind))
    monkeypatch.setattr(recurrent, "require_served", lambda widths, server: None)
    monkeypatch.setattr(recurrent, "measure", lambda *_: {"by_steps": len(begun)})
    command = ["program", "--target", "T", "--draft", "D", "--out", str(out), "--requests", "8", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--add"])
    with pytest.raises(SystemExit):
        recurrent.main()
    assert f"--add: expected rounds in --out {out}, which does not exist" in capsys.readouterr().err
    for more in ([], ["--add"]):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        recurrent.main()
    assert begun == [OURS, PLAIN, BUILT_IN, PLAIN, BUILT_IN, OURS]
    written = json.loads(out.read_text())
    assert {name: of["by_steps"] for name, of in written["figures"]["8"].items()} == {
        PLAIN: [2, 4], BUILT_IN: [3, 5], **dict.fromkeys([OURS, "ours_16", "ours_8", "ours_4"], [1, 6]),
    }  # fmt: skip
    assert written["running_requests"] == dict.fromkeys([OURS, PLAIN, BUILT_IN], [7, 7])


def test_a_batch_lasts_from_its_first_request_to_its_last_token():
    def answer(asked: float, last: float, steps: int = 2) -> Answer:
        return Answer(asked, asked + 0.25, last, 9, steps)

    answers = [answer(1.0, 2.0), answer(1.5, 4.0, 3), answer(6.0, 7.5), answer(5.0, 7.0)]
    assert first_batches.by_batch(answers, 2) == {
        "ms": [3000.0, 2500.0], "prefill_ms": [750.0, 1250.0], "steps": [3, 2],
    }  # fmt: skip
    rounds = [[12.0, *[1.0] * 8, 10.0], [11.0, *[9.0] * 8, 10.0], [90.0, *[1.0] * 8, 9.0]]
    figures = {"8": [{"ms": of} for of in rounds]}
    assert values(first_batches.claims(figures)) == [(1.2, "<= 1.1", False)]


def test_running_requests_are_held_against_the_built_in_workers():
    figures = {BUILT_IN: {"running_requests": 9}, OURS: {"running_requests": 26}}
    assert values(running_requests.claims(figures)) == [(2.8889, ">= 3.0", False)]
    assert running_requests.claims({BUILT_IN: figures[BUILT_IN]}) == []


def test_tokens_beside_rings_are_held_against_those_beside_a_whole_pool():
    figures = {name: {"memory_usage": {"token_capacity": fit}} for name, fit in (("auto", 1160), ("whole", 1000))}
    [claim] = draft_kv.claims(figures, 48)
    assert values([claim]) == [(1.16, ">= 1.17", False)] and "1160 over 1000, 48 requests" in claim["what"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Three gated delta nets and a layer with full attention, with a draft of block 16."""
    shape = random_pair.SHAPES["hybrid-9b"]
    attention = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4)
    heads |= dict(linear_key_head_dim=16, linear_value_head_dim=16)
    ids = dict(vocab_size=320, bos_token_id=256, eos_token_id=257, torch_dtype="float32")
    tiny = replace(
        shape,
        common={**shape.common, **ids},
        target={**shape.target, **attention, **heads, "hidden_size": 64, "intermediate_size": 96},
        draft={**shape.draft, **attention, "num_hidden_layers": 1, "intermediate_size": 96},
        mask_token_id=259,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(random_pair.SHAPES, "hybrid-9b", tiny)
        return random_pair.write_pair(tmp_path_factory.mktemp("pair"), "hybrid-9b", layers=4)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, pair: dict[str, str], tmp_path: Path) -> Any:
    """Runs a module's `main` on a CPU; returns its exit status and its report."""
    monkeypatch.setattr(launch, "Server", engines._ForkedServer)
    flags = "--flags=--sleep-on-idle --skip-server-warmup --max-mamba-cache-size 64 --max-total-tokens 4000"

    def run(module: Any, *options: str) -> tuple[int, dict[str, Any]]:
        out = tmp_path / "out.json"
        models = ["--target", pair["target"], "--draft", pair["draft"], "--device", "cpu", flags]
        monkeypatch.setattr(sys, "argv", ["program", *models, "--out", str(out), *options])
        status = module.main()
        return status, json.loads(out.read_text())

    return run


SMALL = ["--input", "16", "--token-ids", "5", "250", "--mem-fraction", "0.3"]


@pytest.mark.release
@pytest.mark.slow
def test_ours_fixed_widths_and_plain_are_measured_one_server_after_the_other(run, monkeypatch):
    monkeypatch.setattr(recurrent, "WARM_UP", 0.2)
    loads = ["--kinds", OURS, PLAIN, "--requests", "2", "--fixed", "16", "4", "--rounds", "1", "--seconds", "1"]
    _, written = run(recurrent, *SMALL, *loads, "--output", "12")
    assert written["accept_lengths"] == {"4": 3.265, "16": 6.42} and written["running_requests"] == {
        OURS: [2],
        PLAIN: [2],
    }
    figures = written["figures"]["2"]
    assert set(figures) == {OURS, PLAIN, "ours_16", "ours_4"}
    assert [list(figures[name]["by_width"][0]) for name in ("ours_16", "ours_4")] == [["16"], ["4"]]
    assert figures[PLAIN]["accept_length"] == [1.0] and "by_width" not in figures[PLAIN]
    assert 1.5 < figures["ours_4"]["accept_length"][0] < 4
    [claim] = written["claims"]
    assert "2 requests, median of 1 rounds" in claim["what"]


@pytest.mark.release
@pytest.mark.slow
def test_batches_of_each_size_are_timed_from_ready_on(run, monkeypatch):
    monkeypatch.setattr(first_batches, "PAUSE", 0.02)
    monkeypatch.setattr(first_batches, "FIRST", 1000.0)
    options = ["--requests", "2", "1", "--rounds", "1", "--output", "61"]
    status, written = run(first_batches, *SMALL, *options)
    assert status == 0 and list(written["figures"]) == ["1", "2"]
    for [batches] in written["figures"].values():
        assert all(len(of) == 10 and min(of) > 0 for of in batches.values())
        assert all(prefill < whole for prefill, whole in zip(batches["prefill_ms"], batches["ms"], strict=True))
    assert len(written["claims"]) == 2


@pytest.mark.release
@pytest.mark.slow
def test_running_requests_are_those_that_the_states_leave_room_for(run):
    status, written = run(running_requests, "--kinds", OURS)
    assert (status, written["claims"]) == (0, [])
    assert written["figures"][OURS]["running_requests"] == 64 // 5
