"""`bench.real_pair`, `bench.shapes` and `bench.prefills`: what they run, and what a claim is made of."""

from __future__ import annotations

import json
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import prefills, real_pair, shapes
from bench.load import Load
from bench.steady import Look
from dflash_sglang.demo.launch import BUILT_IN, OURS


def test_claims_of_the_real_pair_are_of_accept_lengths_and_of_the_defaults_speed() -> None:
    def one(server: str, requests: int, prompts: str, rate: float, length: float = 9.0) -> dict[str, Any]:
        median = dict(accept_length=length, output_tokens_per_second=rate)
        return dict(server=server, concurrency=requests, prompts=prompts, median=median)

    figures = [
        one("ours, width 16", 64, "data/gsm8k.jsonl", 9000.0, 4.0),
        *(one("ours, width 16", 64, "mt-bench", 9000.0, 2.59), one("ours, width 16", 8, "gsm8k", 9.0)),
        *(one("ours", 64, "gsm8k", 1200.0), one("plain", 64, "gsm8k", 1000.0)),
        *(one("ours", 64, "mt-bench", 900.0), one("plain", 64, "mt-bench", 1000.0)),
        *(one("built-in, width 16", 64, "gsm8k", 1000.0), one("built-in, width 16", 64, "mt-bench", 700.0)),
        *(one("ours", 8, "alpaca", 5.0), one("plain", 8, "alpaca", 1.0), one("ours", 8, "humaneval", 1.0)),
    ]
    assert [(of["what"], of["value"], of["bound"], of["ok"]) for of in real_pair.claims(figures, 16)] == [
        ("accept length, blocks of 16, 64 requests, gsm8k", 4.0, ">= 4.0", True),
        ("accept length, blocks of 16, 64 requests, mtbench", 2.59, ">= 2.6", False),
        ("over no speculation, 64 requests, gsm8k", 1.2, ">= 1.1", True),
        ("over no speculation, 64 requests, mtbench", 0.9, ">= 0.97", False),
        ("over the built-in worker, 64 requests, the worst of 2 sets, gsm8k", 1.2, ">= 1.15", True),
    ]
    assert real_pair.claims([], 16) == []


def test_a_run_of_the_real_pair_that_is_ended_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(settings: Any, results: Any, progress: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setattr(real_pair.sweep, "measure", measure)
    prompts, out = tmp_path / "gsm8k.jsonl", tmp_path / "real_pair.json"
    prompts.write_text(json.dumps({"prompt": "One and one?"}) + "\n")
    pair = ["--target", "training/pair/target", "--draft", "training/pair/draft"]
    monkeypatch.setattr("sys.argv", ["real_pair", "--out", str(out), "--prompts", str(prompts), *pair])
    real_pair.main()
    written = json.loads(out.read_text())
    assert written["incomplete"] == "ended by 143" and written["figures"] == []
    assert [one["server"] for one in written["servers"]] == ["plain", "ours", "ours, width 16"]


def test_each_shape_is_a_run_of_widths_whose_figures_and_claims_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> None:
        ran.append(command)
        out, claim = (
            Path(command[command.index("--out") + 1]),
            dict(what="tokens/s", value=1, bound=">= 2", ok=False),
        )
        out.write_text(json.dumps(dict(figures={"8": len(ran)}, claims=[claim])))

    monkeypatch.setattr(shapes.subprocess, "run", run)
    monkeypatch.setattr(shapes.random_pair, "write_pair", lambda pair, name, config_only: pair.mkdir(parents=True))
    out = tmp_path / "shapes.json"
    asked = ["--shapes", "qwen3-4b", "qwen3-8b-fp8", "--concurrency", "8", "64", "--weights", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["shapes", "--out", str(out), *asked])
    assert shapes.main() == 1
    written = json.loads(out.read_text())
    assert written["figures"] == {"qwen3-4b": {"8": 1}, "qwen3-8b-fp8": {"8": 2}}
    assert [one["what"] for one in written["claims"]] == ["qwen3-4b, tokens/s", "qwen3-8b-fp8, tokens/s"]
    four, fp8 = ran
    assert str(tmp_path / "qwen3-8b" / "target") in fp8 and "8=1.15" in four and "64=1.35" in four
    assert "--flags=" + shapes.SERVING in four and f"--flags={shapes.SERVING} --quantization fp8" in fp8
    assert [path.name for path in tmp_path.glob("*.json")] == ["shapes.json"]


class Slower:
    """A server whose one client has a token each ms, none for 20 ms after a new request, which waits for 30."""

    def __init__(self) -> None:
        self.until = 0.0

    def post(self, path: str, **_: Any) -> None:
        pass

    def stream(self, **_: Any) -> Any:
        self.until = time.perf_counter() + 0.02
        time.sleep(0.03)
        yield {}
        yield {}


def test_a_prefill_holds_others_up_by_the_tokens_that_they_lack_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    server, ended = Slower(), threading.Event()

    class Clients(list[Any]):
        def __enter__(self) -> Any:
            self.append(Namespace(looks=[]))
            self.thread = threading.Thread(target=self._run)
            self.thread.start()
            return self

        def _run(self) -> None:
            while not ended.wait(0.001):
                if time.perf_counter() > server.until:
                    self[0].looks.append(Look(time.perf_counter(), 1))

        def __exit__(self, *_: Any) -> None:
            ended.set()
            self.thread.join()

    monkeypatch.setattr(prefills, "clients", lambda server, load: Clients())
    monkeypatch.setattr(prefills, "RAMP", 0.05)
    asked = Namespace(seconds=1.0, every=0.1, few=2)
    found = prefills.disturbed(server, Load(1, 1, 4, 8), asked)  # type: ignore[arg-type]
    assert found["held_up_ms"] == pytest.approx(20, abs=6) and found["first_token_ms"] == pytest.approx(31, abs=6)


def test_prefills_are_compared_with_the_built_in_workers() -> None:
    def rounds(*held_up: float) -> list[dict[str, float]]:
        return [dict(held_up_ms=of, first_token_ms=10 * of) for of in held_up]

    claimed = prefills.claims({"7": {OURS: rounds(1, 3, 2), BUILT_IN: rounds(1, 2, 9), "plain": rounds(1)}})
    assert [(one["value"], one["bound"], one["ok"]) for one in claimed] == [(1.0, "<= 1.05", True)] * 2
