"""Which launches keep the draft's rows in rings, and why the others do not."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.kernels.context.rings import RingShape
from dflash_sglang.settings.plugin_config import PluginConfig
from dflash_sglang.startup.draft_kv import needs_whole_pool, ring_shape
from tests.support.tiny import draft_config

SLIDING = dict(layer_types=["sliding_attention"] * 2, sliding_window=100)


def chosen(
    config: dict[str, Any] | None = None,
    draft: dict[str, Any] = SLIDING,
    page: int = 1,
    window: int | None = None,
    sinks: int | None = None,
    whole_for: str | None = None,
) -> RingShape | str:
    spec = DraftSpec.from_config(draft_config(**draft))
    settings = PluginConfig.from_mapping({"draft_kv": "auto", "width": {"trees": []}, **(config or {})})
    return ring_shape(spec, settings, 8, page, window, sinks, whole_for)


def test_rings_have_the_window_of_the_layers_or_the_imposed_one_and_room_for_two_blocks():
    assert chosen() == RingShape(100, 1, 116)
    assert chosen(page=16) == RingShape(100, 16, 160)  # 116, and 15 at both ends
    assert chosen(draft={}, window=40, sinks=0) == RingShape(40, 1, 56)
    assert chosen(window=40) == RingShape(40, 1, 56)
    assert chosen({"width": {"trees": [16, 32]}}) == RingShape(100, 1, 140)
    assert chosen({"width": {}}) == RingShape(100, 1, 172)  # trees of 64 nodes


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        (dict(config={"draft_kv": "whole"}), 'draft_kv is "whole"'),
        (dict(draft={}), "layer 1 of the draft sees the whole context"),
        (dict(window=40, sinks=4), "--speculative-draft-sink-size keeps the first tokens of every request"),
        (
            dict(whole_for=needs_whole_pool(True, "null")),
            "--enable-hierarchical-cache takes the draft's rows by the target's slots",
        ),
        (
            dict(whole_for=needs_whole_pool(False, "decode")),
            "--disaggregation-mode decode takes the draft's rows by the target's slots",
        ),
    ],
)
def test_the_pool_is_whole_for_a_reason(launch, why):
    assert chosen(**launch) == why


def test_most_launches_need_no_whole_pool():
    assert needs_whole_pool(False, "null") is None and needs_whole_pool(False, None) is None
