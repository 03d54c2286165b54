"""bench/disaggregated.py: a decode server beside the built-in worker's, and beside one server."""

from __future__ import annotations

import pytest

from bench.disaggregated import ONE_SERVER, claims
from dflash_sglang.demo.launch import BUILT_IN, OURS

STEPS = {OURS: [9.0, 6.0, 9.4], BUILT_IN: [10.0, 6.6, 10.0], ONE_SERVER: [9.0, 6.1, 9.3]}
LENGTHS = {OURS: [6.0, 4.0, 6.0], BUILT_IN: [6.0, 4.0, 6.0], ONE_SERVER: [6.0, 4.0, 6.0]}


@pytest.mark.parametrize(
    ("slower", "failed"),
    [("", []), (OURS, ["time per output token", "step time"]), (ONE_SERVER, []), (BUILT_IN, [])],
)
def test_a_decode_server_has_most_of_its_claims_to_lose_by_being_slower(slower, failed):
    servers = {
        name: dict(step_ms=[step * (1.06 if name == slower else 1) for step in steps], accept_length=LENGTHS[name])
        for name, steps in STEPS.items()
    }
    found = claims({"8": servers})
    assert [one["what"].partition(" over")[0] for one in found if not one["ok"]] == failed
    assert len(found) == 2
    assert len(claims({"8": {name: servers[name] for name in (OURS, ONE_SERVER)}})) == 1


def test_time_per_output_token_divides_a_step_by_its_own_rounds_accept_length():
    figure = dict(step_ms=[8.0, 8.0, 8.0], accept_length=[4.0, 2.0, 1.0])
    half = dict(step_ms=[2.0, 2.0, 2.0], accept_length=[1.0, 1.0, 1.0])
    servers = {OURS: half, BUILT_IN: figure, ONE_SERVER: half}
    assert [one["value"] for one in claims({"1": servers})] == [0.5, 1.0]
