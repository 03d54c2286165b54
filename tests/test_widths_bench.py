"""`bench.widths`: its servers, what they are compared with, when a moving load has settled."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from bench import widths
from dflash_sglang.bench.kinds import BUILT_IN, OURS, PLAIN


def test_servers_differ_in_width_and_the_built_in_worker_gets_the_mean_length():
    asked = Namespace(
        acceptance="good", kinds=[OURS, PLAIN, BUILT_IN], fixed=[16, 4], gpus=["0", "1"], per_request=False
    )
    ours, plain, built_in, sixteen, four = widths.candidates_of(asked)
    assert [one.gpus for one in (ours, plain, built_in, sixteen, four)] == ["0", "1", "0", "1", "0"]
    settings = [json.loads(one.environment["DFLASH_SGLANG_CONFIG"]) for one in (ours, sixteen, four)]
    assert [one.pop("width", None) for one in settings] == [None, 16, 4]
    assert settings == [{"simulated_acceptance": [[0.866] * 7 + [0.819] * 8]}] * 3
    assert [one.accept_length for one in (ours, built_in)] == [0, pytest.approx(6.4, abs=0.03)]
    assert not plain.environment and not built_in.environment


def test_ours_verifies_a_number_of_tokens_per_request_where_asked_to_beside_one_width():
    asked = Namespace(acceptance="mixed", kinds=[OURS], fixed=[4], gpus=None, per_request=True)
    found = widths.candidates_of(asked)
    assert [one.name for one in found] == ["ours", "ours_one_width", "ours_4"]
    settings = [json.loads(one.environment["DFLASH_SGLANG_CONFIG"]).get("width") for one in found]
    assert settings == [{"per_request": True}, None, 4]


def rates(**of: float) -> dict[str, dict[str, list[float]]]:
    """Three rounds whose medians these are."""
    return {name: {"tokens_per_second": [rate * 0.1, rate, rate * 1.5]} for name, rate in of.items()}


def test_ours_is_held_against_the_best_of_the_others_and_against_the_built_in_worker():
    figures = {"64": rates(ours=150, plain=60, ours_16=100, ours_8=155, built_in=101)}
    best, built_in = widths.claims("good", figures)
    assert "best other server, ours_8" in best["what"] and (best["value"], best["ok"]) == (0.9677, False)
    assert (built_in["value"], built_in["bound"], built_in["ok"]) == (1.4851, ">= 1.5", False)
    [poor] = widths.claims("poor", {"64": rates(ours=60, plain=61)})
    assert (poor["value"], poor["bound"], poor["ok"]) == (0.9836, ">= 0.97", True)
    [mixed] = widths.claims("mixed", {"64": rates(ours=60, ours_4=61)})
    assert (mixed["bound"], mixed["ok"]) == (">= 1.0", False)


def test_a_load_has_settled_after_the_last_look_with_more_than_probes_of_other_widths():
    def looks(*steps: tuple[int, int]) -> list[widths.Look]:
        """Steps at widths 16 and 4 between each look and the next."""
        so_far = {"16": 100, "4": 7}
        taken = [(0.0, dict(so_far))]
        for sixteen, four in steps:
            so_far["16"] += sixteen
            so_far["4"] += four
            taken.append((0.0, dict(so_far)))
        return taken

    moved = looks((5, 0), (0, 0), (3, 2), (0, 5), (1, 4), (0, 5), (0, 5), (1, 9))
    assert widths.settling(moved) == {"width": 4, "settled_after": 10, "steps": 40}
    stayed = looks((5, 0), (4, 1), (5, 0), (5, 0))
    assert widths.settling(stayed) == {"width": 16, "settled_after": 0, "steps": 20}
    swings = looks((5, 0), (0, 5), (5, 0), (0, 5), (5, 0))
    assert widths.settling(swings) == {"width": 16, "settled_after": 20, "steps": 25}
