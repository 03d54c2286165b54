"""`bench.widths`: its servers and their loads, what they are compared with, when a moving load has settled."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest

from bench import widths
from bench.load import Load
from dflash_sglang.bench.kinds import BUILT_IN, OURS, PLAIN


def asked(**more: Any) -> Namespace:
    usual = dict(acceptance="good", kinds=[OURS], fixed=[16, 4], control=[], gpus=None, per_request=False)
    return Namespace(**{**usual, **more})


def test_fixed_widths_are_loads_and_those_of_the_control_servers_too():
    kinds = [OURS, PLAIN, BUILT_IN]
    ours, plain, built_in, four = found = widths.candidates_of(asked(kinds=kinds, control=[4], gpus=["0", "1"]))
    assert [one.name for one in found] == ["ours", "plain", "built_in", "ours_alone_4"]
    assert [one.gpus for one in found] == ["0", "1", "0", "1"]
    settings = [json.loads(one.environment["DFLASH_SGLANG_CONFIG"]) for one in (ours, four)]
    assert [one.pop("width", None) for one in settings] == [None, 4]
    assert settings == [{"simulated_acceptance": [[0.866] * 7 + [0.819] * 8]}] * 2
    assert [one.accept_length for one in (ours, built_in)] == [0, pytest.approx(6.4, abs=0.03)]
    assert not plain.environment and not built_in.environment
    forced = widths.forced([16, 4])
    assert forced["ours_4"] == {"dflash": {"min_width": 4, "max_width": 4}} and list(forced) == [
        "ours_16",
        "ours_4",
    ]
    by_gpu = widths.names_by_gpu(found, OURS, list(forced))
    assert by_gpu == [["ours", "ours_16", "ours_4", "built_in"], ["plain", "ours_alone_4"]]


def test_ours_verifies_a_number_of_tokens_per_request_where_asked_to_beside_one_width():
    found = widths.candidates_of(asked(acceptance="mixed", per_request=True, control=[4]))
    assert [one.name for one in found] == ["ours", "ours_one_width", "ours_alone_4"]
    settings = [json.loads(one.environment["DFLASH_SGLANG_CONFIG"]).get("width") for one in found]
    assert settings == [{"per_request": True}, None, 4]


class Stub:
    """A server that notes the widths that are asked of it, in order, and how many requests ask."""

    url = "stub"

    def __init__(self) -> None:
        self.loads: list[list[Any]] = []

    def get(self, path: str) -> Any:
        return {"internal_states": [{"dflash_width": {"steps": {"1": 0, "4": 3, "16": 0}}}]}

    def post(self, path: str) -> None:
        self.loads.append([])

    def stream(self, input_ids: list[int], sampling_params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        custom = sampling_params["custom_params"]
        self.loads[-1].append(None if custom is None else custom["dflash"]["min_width"])
        for tokens in (1, 8):
            yield {"meta_info": {"completion_tokens": tokens, "spec_verify_ct": 2}}


def test_a_width_that_requests_ask_for_is_one_of_the_turns_of_the_policys_server():
    ours, plain = Stub(), Stub()
    names, load = ["ours", "ours_4", "plain"], Load(2, 5, 4, 8)
    figures = widths.measure({"ours": ours, "plain": plain}, [names], load, 2, widths.forced([4]), "ours")
    assert {name: len(figure["tokens_per_second"]) for name, figure in figures.items()} == dict.fromkeys(names, 2)
    assert plain.loads == [[None] * 2, [None] * 5, [None] * 5]
    # Both warm; a round that ours begins and one that it ends, each after a load that is not measured.
    before, ours_load, four = [None] * 2, [None] * 5, [4] * 5
    assert ours.loads == [before, [4] * 2, before, ours_load, four, four, before, ours_load]


def test_a_width_that_is_not_served_ends_the_run_and_is_named():
    widths.require_served([16, 4], Stub())
    with pytest.raises(
        ValueError, match="--fixed 12 8: expected widths that the policy's server has, 1 4 16; its"
    ):
        widths.require_served([16, 12, 8], Stub())


def rates(**of: float) -> dict[str, dict[str, list[float]]]:
    """Three rounds whose medians these are."""
    return {name: {"tokens_per_second": [rate * 0.1, rate, rate * 1.5]} for name, rate in of.items()}


def test_ours_is_held_against_the_best_of_the_others_and_against_the_built_in_worker():
    figures = {"64": rates(ours=150, plain=60, ours_16=100, ours_8=155, ours_alone_16=98, built_in=101)}
    control, best, built_in = widths.claims("good", figures)
    assert "tokens/s of ours_16 over those of ours_alone_16" in control["what"] and control["value"] == round(
        100 / 98, 4
    )
    assert "best other server, ours_8" in best["what"] and (best["value"], best["ok"]) == (0.9677, False)
    assert (built_in["value"], built_in["bound"], built_in["ok"]) == (1.4851, ">= 1.5", False)
    control, best = widths.claims("good", {"8": rates(ours=150, ours_8=96, ours_alone_8=100)})
    assert (control["value"], control["bound"], control["ok"]) == (0.96, ">= 0.97", False)
    assert "best other server, ours_alone_8" in best["what"] and best["value"] == 1.5
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
