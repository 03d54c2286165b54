"""The clock of `bench.host_step`: whose time it is, and which iterations count."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from bench import host_stages
from bench.host_step import of_owner, table


class Hand:
    """A clock that stands still but for `move`, in microseconds."""

    now = 0

    def move(self, microseconds: int) -> None:
        self.now += 1000 * microseconds

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def hand(monkeypatch) -> Hand:
    hand = Hand()
    monkeypatch.setattr(host_stages, "time", hand)
    return hand


def batch(requests: int, decodes: bool = True) -> Any:
    return SimpleNamespace(reqs=[None] * requests, forward_mode=SimpleNamespace(is_decode=lambda: decodes))


def test_a_stage_has_its_own_time_and_a_step_that_follows_another_of_its_size_counts(hand, tmp_path):
    clock = host_stages.Clock(tmp_path / "stages.json")
    inner = clock.timed("sglang: inner", lambda: hand.move(30))

    def of_outer() -> None:
        hand.move(5)
        inner()
        inner()
        hand.move(7)

    outer = clock.timed("worker: outer", of_outer)
    for of_iteration in (batch(8, decodes=False), batch(8), batch(8), batch(3), batch(8), batch(8), None):
        if of_iteration is not None:
            clock.decodes(of_iteration)
            outer()
            hand.move(100)
        assert not (tmp_path / "stages.json").exists(), "written once idle"
        clock.turn()
    written = json.loads((tmp_path / "stages.json").read_text())
    assert written == {
        "8": {
            "steps": 2,  # not the one after the prefill, nor those around the batch of three
            "whole": 172.0,
            "stages": {"sglang: inner": 60.0, "worker: outer": 12.0},
            "calls": {"sglang: inner": 2, "worker: outer": 1},
        }
    }
    assert (of_owner(written["8"], "worker"), of_owner(written["8"], "sglang")) == (12.0, 60.0)
    last = [line.split()[-1] for line in table(written).splitlines()]
    assert last == ["8", "60.0", "12.0", "12.0", "60.0", "0.0", "0.0", "172.0"]
