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
from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.demo.launch import BUILT_IN, OURS, PLAIN
from dflash_sglang.demo.server import ServerFailed


def asked(**more: Any) -> Namespace:
    usual = dict(acceptance="good", kinds=[OURS], fixed=[16, 4], gpus=None)
    return Namespace(**{**usual, **dict(trees=[], alike=False, flags=[], built_in_flags=[]), **more})


def test_the_built_in_worker_may_have_an_algorithm_and_ratios_of_its_own():
    flags = ["--speculative-algorithm", "DSPARK"]
    ours, built_in = widths.candidates_of(asked(kinds=[OURS, BUILT_IN], built_in_flags=flags))
    assert ours.flags == () and built_in.flags == tuple(flags) and built_in.accept_length == 6.42
    rates = {OURS: {"tokens_per_second": [11]}, BUILT_IN: {"tokens_per_second": [10]}}
    claimed = widths.claims("good", {"1": rates, "64": rates}, wanted={"1": 1.05, "64": 1.3})
    assert [(claim["bound"], claim["ok"]) for claim in claimed] == [(">= 1.05", True), (">= 1.3", False)]


def test_fixed_widths_are_loads_of_the_server_that_chooses():
    ours, plain, built_in = found = widths.candidates_of(asked(kinds=[OURS, PLAIN, BUILT_IN], gpus="0,1"))
    assert [(one.name, one.gpus) for one in found] == [("ours", "0,1"), ("plain", "0,1"), ("built_in", "0,1")]
    profile = [[0.866] * 7 + [0.819] * 8]
    settings = {"copy": "off", "width": {"highest_min_width": 16}}
    assert json.loads(ours.environment["DFLASH_SGLANG_CONFIG"]) == settings
    assert json.loads(ours.environment["DFLASH_SGLANG_FORCED"]) == profile
    assert [one.accept_length for one in (ours, built_in)] == [0, pytest.approx(6.4, abs=0.03)]
    assert not plain.environment and not built_in.environment
    forced = widths.forced([16, 4])
    assert forced["ours_4"] == {"dflash": {"min_width": 4, "max_width": 4}} and list(forced) == [
        "ours_16",
        "ours_4",
    ]


def test_a_record_forces_both_workers():
    record = widths.record_of("recorded", Path())
    ours, built_in = widths.candidates_of(asked(kinds=[OURS, BUILT_IN]), record)
    forced = [json.loads(one.environment["DFLASH_SGLANG_FORCED"]) for one in (ours, built_in)]
    assert forced == [{"record": str(widths.PAIR_RECORD)}] * 2
    assert AcceptanceRecord.load(widths.PAIR_RECORD).accepted.max() == 15
    assert built_in.program == ("-m", "bench.coins") and ours.accept_length == built_in.accept_length == 0


def test_half_of_the_requests_of_a_mixed_record_have_easy_texts(tmp_path):
    usual = AcceptanceRecord.load(widths.PAIR_RECORD)
    mixed = AcceptanceRecord.load(widths.record_of("recorded_mixed", tmp_path))
    easy, hard = np.split(mixed.accepted, 2)
    assert [1 + easy.mean(), 1 + hard.mean()] == pytest.approx([10.4, 4.9], abs=0.1)
    first = usual.prompts == mixed.prompts[0]  # of the easiest text, as it was
    assert all((a[: first.sum()] == b[first]).all() for a, b in zip(mixed, usual, strict=True))


@pytest.mark.parametrize(("flags", "formats"), [
    ([], ("--speculative-draft-model-quantization", "unquant")), (["--quantization", "fp8"], ()),
])  # fmt: skip
def test_trees_and_the_built_in_workers_formats_have_servers_of_their_own(flags, formats):
    found = {one.name: one for one in widths.candidates_of(asked(trees=[16, 32], alike=True, flags=flags))}
    settings = {name: json.loads(one.environment["DFLASH_SGLANG_CONFIG"]) for name, one in found.items()}
    assert {name: of["width"] for name, of in settings.items()} == {
        "ours": {"highest_min_width": 16, "trees": [16, 32]},
        "ours_tree_16": "tree 16",
        "ours_tree_32": "tree 32",
        "ours_alike": {},
    }
    assert found["ours_alike"].flags == formats and settings["ours_alike"]["draft_head"] == "as_is"


class Stub:
    """A server that notes the widths that are asked of it, load after load."""

    url = "stub"

    def __init__(self, tokens: int) -> None:
        """tokens: of each answer, at once."""
        self.tokens, self.loads, self.steps = tokens, list[set[Any]](), 0

    def get(self, path: str) -> Any:
        self.steps += 3
        widths = {
            "steps": {"1": 0, "4": self.steps, "16": 1},
            "probes": {"1": 0, "4": 0, "16": 1},
            "seconds": {"1": 0.0, "4": 0.5 * self.steps, "16": 0.1},
        }
        return {"internal_states": [{"dflash_width": widths}]}

    def post(self, path: str, **body: Any) -> None:
        if path.startswith("/flush_cache"):
            self.loads.append(set())

    def stream(self, input_ids: list[int], sampling_params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        custom = sampling_params["custom_params"]
        self.loads[-1].add(None if custom is None else custom["dflash"]["min_width"])
        time.sleep(0.001)
        yield {"meta_info": {"completion_tokens": self.tokens, "spec_verify_ct": 2, "finish_reason": {}}}


def test_a_width_that_requests_ask_for_is_one_of_the_turns_of_the_policys_server(monkeypatch):
    monkeypatch.setattr(steady, "RAMP", 0.0)
    monkeypatch.setattr(steady, "WARM_UP", 0.001)
    monkeypatch.setattr(steady, "CONTENDER", 0.5)
    ours, plain = Stub(8), Stub(2)
    servers = {"ours": ours, "plain": plain}
    figures = widths.measure(servers, Load(2, 5, 4, 8), 2, 0.1, widths.forced([4]))
    rounds = {name: len(figure["tokens_per_second"]) for name, figure in figures.items()}
    assert rounds == {"ours": 2, "ours_4": 2, "plain": 1}
    # As many between two looks.
    assert figures["ours"]["by_width"] == figures["ours_4"]["by_width"] == [{"4": [3, 0, 1.5]}] * 2
    assert "by_width" not in figures["plain"]
    assert plain.loads == [{None}] * 2, "warm, and slower by far than ours"
    # Warm; a round that ours begins and one that it ends, each after a load that is not measured.
    before, measured, four = {None}, {None}, {4}
    assert ours.loads == [four, before, measured, four, four, before, measured]


def test_a_steady_load_counts_what_came_between_two_moments_and_the_steps_of_what_has_ended():
    whole = {1: (9, 3), 4: (31, 7), 5: (50, 1)}
    looks = [steady.Look(at, tokens, whole.get(at)) for at, tokens in ((1, 9), (2, 6), (4, 10), (5, 8))]
    assert steady.outcome(looks, 3, 1, 4) == Outcome(tokens_per_second=16 / 3, accept_length=4.0, step_ms=2250.0)
    looks = [steady.Look(2, 32), steady.Look(3, 32, (64, 0))]
    assert steady.outcome(looks, 1, 1, 3) == Outcome(tokens_per_second=32.0, accept_length=1.0, step_ms=31.25)
    with pytest.raises(RuntimeError, match="no answer ended in 1.5 s"):
        steady.outcome(looks, 1, 1, 2.5)


def test_clients_ask_for_other_lengths_each_and_begin_in_the_middle():
    first, later = [], []
    for number in range(400):
        lengths = steady.Client(Stub(1), Load(1, 1, output_tokens=100), number, threading.Event())._lengths()
        first.append(next(lengths))
        later += [next(lengths) for _ in range(3)]
    assert (min(later), max(later)) == (50, 150) and sum(later) / len(later) == pytest.approx(100, rel=0.03)
    assert min(first) <= 3 and max(first) <= 150
    # Found at a moment: the mean of length squared over twice the mean length.
    assert sum(first) / len(first) == pytest.approx(100 * (1 + 1 / 12) / 2, rel=0.1)


def test_a_client_that_fails_ends_the_load():
    class Failing(Stub):
        def stream(self, input_ids: list[int], sampling_params: dict[str, Any]) -> Iterator[dict[str, Any]]:
            raise ServerFailed("the server refused the request: full")

    with pytest.raises(RuntimeError, match="2 of 2 clients failed on stub: .*full"):
        steady.watch(Failing(1), Load(2, 1), 0.0)


def test_who_is_far_from_the_best_has_no_other_round():
    rates = dict(ours=100.0, ours_16=84.0, ours_8=110.0, ours_4=93.4, plain=20.0)
    assert steady.contenders(rates, ["plain", "ours"]) == ["ours", "ours_8", "plain"]
    assert steady.contenders({**rates, "ours": 150.0}, ["ours"]) == ["ours", "ours_8"], (
        "the best is measured as often"
    )


def test_a_width_that_is_not_served_ends_the_run_and_is_named():
    widths.require_served([16, 4], Stub(1))
    with pytest.raises(
        ValueError, match="--fixed 12 8: expected widths that the policy's server has, 1 4 16; its"
    ):
        widths.require_served([16, 12, 8], Stub(1))


def rates(**of: float) -> dict[str, dict[str, list[float]]]:
    """Three rounds whose medians these are."""
    return {name: {"tokens_per_second": [rate * 0.1, rate, rate * 1.5]} for name, rate in of.items()}


def test_ours_is_held_against_the_best_of_the_others_and_against_the_built_in_worker():
    figures = {"64": rates(ours=150, plain=60, ours_16=100, ours_8=155, built_in=95)}
    best, built_in = widths.claims("recorded", figures)
    assert "best other server, ours_8" in best["what"] and (best["value"], best["ok"]) == (0.9677, False)
    assert (built_in["value"], built_in["bound"], built_in["ok"]) == (1.5789, ">= 1.6", False)
    figures = {"64": rates(ours=160, built_in=100), "256": rates(ours=97, built_in=100)}
    for fp8, oks in ((False, [True, True]), (True, [False, True])):
        assert [one["ok"] for one in widths.claims("recorded", figures, fp8)] == oks
    [mixed] = widths.claims("recorded_mixed", {"64": rates(ours=60, ours_4=61)})
    assert (mixed["bound"], mixed["ok"]) == (">= 1.15", False)
