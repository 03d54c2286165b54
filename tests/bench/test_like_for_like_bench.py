"""bench.like_for_like: what is compared with what, and what a claim is made of."""

from __future__ import annotations

import json

import pytest

from bench.like_for_like import GROUPS, candidate, expected_length, others
from bench.widths import ACCEPTANCE
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig

[GOOD] = ACCEPTANCE["good"]


@pytest.mark.parametrize("name, group", GROUPS.items())
def test_every_load_of_ours_is_compared_with_a_server_of_its_group(name, group):
    for server in group.servers:
        if server.startswith("ours"):
            whole, chosen = others(f"{server}_16", group), others(server, group)
            assert [one for one in chosen if one != "plain"] == whole
            assert len(whole) == 1 and whole[0].startswith("built_in")
            assert ("plain" in chosen) == ("plain" in group.servers)


def test_both_sides_have_one_format_and_one_acceptance():
    ours, built_in = (candidate(name, (), GOOD) for name in ("ours_dense", "built_in_dense"))
    assert ours.flags == built_in.flags == ("--speculative-draft-model-quantization", "unquant")
    settings = PluginConfig.from_mapping(json.loads(ours.environment[CONFIG_ENV]))
    assert settings.draft_head == "as_is" and settings.width.highest_min_width == 16
    assert ours.environment["DFLASH_SGLANG_FORCED"] == built_in.environment["DFLASH_SGLANG_FORCED"]
    assert built_in.program == ("-m", "bench.coins")
    assert "draft_head" not in json.loads(candidate("ours", (), GOOD).environment[CONFIG_ENV])


def test_the_accept_length_in_the_long_run_is_that_of_the_widths_that_steps_had():
    figures = {"by_width": [{"16": [30, 0, 1.0], "1": [10, 0, 1.0]}]}
    assert expected_length("built_in", {}, 0, GOOD) == pytest.approx(6.42, abs=0.01)
    assert expected_length("ours", figures, 0, GOOD) == pytest.approx((3 * 6.42 + 1) / 4, abs=0.01)
    assert expected_length("plain", {}, 0, GOOD) == 1.0
