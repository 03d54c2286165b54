"""`bench.widths` and `bench.steady`: servers and their loads, and what they are compared with."""

from __future__ import annotations

import json
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import steady, widths
from bench.load import Load, Outcome
from bench.servers import Candidate
from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from dflash_sglang.demo.server import ServerFailed


def candidates(record: Path | None = None, **more: Any) -> list[Candidate]:
    usual = dict(acceptance="good", kinds=[OURS, PLAIN, BUILT_IN], fixed=[16, 4], gpus=None)
    asked = {**usual, **dict(trees=[], alike=False, flags=[], built_in_flags=[]), **more}
    return widths.candidates_of(Namespace(**asked), record)


def test_servers_differ_in_widths_formats_and_algorithm_and_are_forced_alike() -> None:
    unquant = ("--speculative-draft-model-quantization", "unquant")
    for flags, formats in (([], unquant), (["--quantization", "fp8"], ())):
        dspark = ["--speculative-algorithm", "DSPARK"]
        found = candidates(gpus="0,1", trees=[16, 32], alike=True, flags=flags, built_in_flags=dspark)
        named = {one.name: one for one in found}
        assert list(named) == ["ours", "plain", "built_in", "ours_tree_16", "ours_tree_32", "ours_alike"]
        assert {one.gpus for one in found} == {"0,1"}
        ours = [one for one in found if one.kind == OURS]
        settings = {one.name: json.loads(one.environment["DFLASH_SGLANG_CONFIG"]) for one in ours}
        assert {name: of["width"] for name, of in settings.items()} == {
            "ours": {"highest_min_width": 16, "trees": [16, 32]},
            "ours_tree_16": "tree 16",
            "ours_tree_32": "tree 32",
            "ours_alike": {},
        }
        assert settings["ours_alike"]["draft_head"] == "as_is" and settings["ours"]["copy"] == "off"
        assert named["ours_alike"].flags == formats and named["built_in"].flags == tuple(dspark)
        profile = [[0.866] * 7 + [0.819] * 8]
        assert all(json.loads(one.environment["DFLASH_SGLANG_FORCED"]) == profile for one in ours)
        assert [named[name].accept_length for name in ("ours", "built_in")] == [0, pytest.approx(6.4, abs=0.03)]
    record = widths.record_of("recorded", Path())
    ours, _, built_in = candidates(record)
    forced = [json.loads(one.environment["DFLASH_SGLANG_FORCED"]) for one in (ours, built_in)]
    assert forced == [{"record": str(widths.PAIR_RECORD)}] * 2
    assert built_in.program == ("-m", "bench.coins") and ours.accept_length == built_in.accept_length == 0


def test_half_of_the_requests_of_a_mixed_record_have_easy_texts(tmp_path: Path) -> None:
    usual = AcceptanceRecord.load(widths.PAIR_RECORD)
    mixed = AcceptanceRecord.load(widths.record_of("recorded_mixed", tmp_path))
    easy, hard = np.split(mixed.accepted, 2)
    assert [1 + easy.mean(), 1 + hard.mean()] == pytest.approx([7.53, 2.70], abs=0.01)
    first = usual.prompts == mixed.prompts[0]  # of the easiest text, as it was
    assert all((a[: first.sum()] == b[first]).all() for a, b in zip(mixed, usual, strict=True))


class Stub:
    """A server that notes the widths that are asked of it, load after load."""

    url = "stub"

    def __init__(self, tokens: int, fails: bool = False) -> None:
        """tokens: of each answer, at once."""
        self.tokens, self.fails, self.loads, self.steps = tokens, fails, list[set[Any]](), 0

    def get(self, path: str) -> Any:
        self.steps += 3
        told = {
            "steps": {"1": 0, "4": self.steps, "16": 1},
            "probes": {"1": 0, "4": 0, "16": 1},
        }
        return {"internal_states": [{"dflash_width": told}]}

    def post(self, path: str, **body: Any) -> None:
        if path.startswith("/flush_cache"):
            self.loads.append(set())

    def stream(self, input_ids: list[int], sampling_params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.fails:
            raise ServerFailed("the server refused the request: full")
        custom = sampling_params["custom_params"]
        self.loads[-1].add(None if custom is None else custom["dflash"]["min_width"])
        time.sleep(0.001)
        yield {"meta_info": {"completion_tokens": self.tokens, "spec_verify_ct": 2, "finish_reason": {}}}


def test_a_width_that_requests_ask_for_is_one_of_the_turns_of_the_policys_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steady, "RAMP", 0.0)
    monkeypatch.setattr(steady, "WARM_UP", 0.001)
    monkeypatch.setattr(steady, "CONTENDER", 0.5)
    ours, plain = Stub(8), Stub(2)
    figures = widths.measure({"ours": ours, "plain": plain}, Load(2, 5, 4, 8), 2, 0.1, widths.forced([4]))
    rounds = {name: len(figure["tokens_per_second"]) for name, figure in figures.items()}
    assert rounds == {"ours": 2, "ours_4": 2, "plain": 1}
    # As many between two looks.
    assert figures["ours"]["by_width"] == figures["ours_4"]["by_width"] == [{"4": [3, 0]}] * 2
    assert "by_width" not in figures["plain"]
    assert plain.loads == [{None}] * 2, "warm, and slower by far than ours"
    # Warm; a round that ours begins and one that it ends, each after a load that is not measured.
    before, measured, four = {None}, {None}, {4}
    assert ours.loads == [four, before, measured, four, four, before, measured]
    with pytest.raises(RuntimeError, match="2 of 2 clients failed on stub: .*full"):
        steady.watch(Stub(1, fails=True), Load(2, 1), 0.0)
    widths.require_served([16, 4], ours)
    with pytest.raises(
        ValueError, match="--fixed 12 8: expected widths that the policy's server has, 1 4 16; its"
    ):
        widths.require_served([16, 12, 8], ours)


def test_a_steady_load_counts_what_came_between_two_moments_and_the_steps_of_what_has_ended() -> None:
    whole = {1: (9, 3), 4: (31, 7), 5: (50, 1)}
    looks = [steady.Look(at, tokens, whole.get(at)) for at, tokens in ((1, 9), (2, 6), (4, 10), (5, 8))]
    assert steady.outcome(looks, 3, 1, 4) == Outcome(tokens_per_second=16 / 3, accept_length=4.0, step_ms=2250.0)
    with pytest.raises(RuntimeError, match="no answer ended in 1.5 s"):
        steady.outcome([steady.Look(2, 32), steady.Look(3, 32, (64, 0))], 1, 1, 2.5)
    first, later = [], []
    for number in range(400):
        lengths = steady.Client(Stub(1), Load(1, 1, output_tokens=100), number, threading.Event())._lengths()
        first.append(next(lengths))
        later += [next(lengths) for _ in range(3)]
    assert (min(later), max(later)) == (50, 150) and sum(later) / len(later) == pytest.approx(100, rel=0.03)
    # Found at a moment: the mean of length squared over twice the mean length.
    assert min(first) <= 3 and sum(first) / len(first) == pytest.approx(100 * (1 + 1 / 12) / 2, rel=0.1)


def rates(**of: float) -> dict[str, dict[str, list[float]]]:
    """Three rounds whose medians these are."""
    return {name: {"tokens_per_second": [rate * 0.1, rate, rate * 1.5]} for name, rate in of.items()}


def test_ours_is_held_against_the_best_of_the_others_and_against_the_built_in_worker() -> None:
    at_64, more = rates(ours=150, plain=60, ours_16=100, ours_8=155, built_in=95), rates(ours=160, built_in=100)
    for acceptance, figures, options, expected in (
        ("recorded", {"64": at_64}, {}, [(0.9677, ">= 0.98", False), (1.5789, ">= 1.6", False)]),
        ("recorded", {"64": more}, {"fp8": True}, [(1.6, ">= 1.65", False)]),
        ("recorded", {"256": rates(ours=97, built_in=100)}, {}, [(0.97, ">= 0.97", True)]),
        ("recorded_mixed", {"64": rates(ours=60, ours_4=61)}, {}, [(0.9836, ">= 1.15", False)]),
        ("good", {"64": more}, {"wanted": {"64": 1.3}}, [(1.6, ">= 1.3", True)]),
    ):
        claimed = widths.claims(acceptance, figures, **options)
        assert [(one["value"], one["bound"], one["ok"]) for one in claimed] == expected
    assert "best other server, ours_8" in widths.claims("recorded", {"64": at_64})[0]["what"]
