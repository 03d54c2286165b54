"""`bench.recurrent`: claims, and tokens at the accept length of the long run."""

from __future__ import annotations

from typing import Any

import pytest

from bench import recurrent
from bench.load import Load, Outcome
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN

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
