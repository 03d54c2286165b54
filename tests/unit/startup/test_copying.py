"""Which launches propose copies, and why others do not."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_sglang.settings.plugin_config import PluginConfig, PluginConfigError
from dflash_sglang.startup.copying import beyond_blocks_problem, copies_in_words, renamed_slots_problem


@pytest.mark.parametrize(
    ("settings", "without_tokens", "words"),
    [
        ({}, None, 'off (copy is "off")'),
        ({"copy": "off"}, "--enable-hierarchical-cache", 'off (copy is "off")'),
        ({"copy": "block"}, None, "block"),
        ({"copy": 64}, None, "64"),
        (
            {"copy": 64},
            "--enable-hierarchical-cache",
            "off (--enable-hierarchical-cache brings KV without its tokens)",
        ),
        (
            {"copy": "block", "simulated_acceptance": [0.5]},
            None,
            "off (acceptance is forced, whatever is proposed)",
        ),
        ({"copy": "block", "simulated_acceptance": {"texts": __file__}}, None, "block"),
        (
            {"copy": "block"},
            "--disaggregation-mode decode",
            "off (--disaggregation-mode decode brings KV without its tokens)",
        ),
    ],
)
def test_copies_are_proposed_where_asked_for_and_where_tokens_of_slots_are_known(
    settings: dict[str, Any], without_tokens: str | None, words: str
) -> None:
    assert copies_in_words(PluginConfig.from_mapping(settings), without_tokens) == words


def test_another_value_is_refused_with_those_that_are_known() -> None:
    for value, shown in (("all", r"'all' \(str\)"), (32, r"32 \(int\)"), ("64", r"'64' \(str\)")):
        with pytest.raises(PluginConfigError, match=f"copy={shown}: expected one of off, block, 64"):
            PluginConfig.from_mapping({"copy": value})


def test_pools_that_rename_slots_are_refused_with_the_setting() -> None:
    assert str(renamed_slots_problem("block")) == (
        "DFLASH_SGLANG_CONFIG copy='block': expected 'off' with KV pools that rename slots. Leave it out."
    )


def test_a_launch_that_cannot_copy_beyond_the_block_is_told_why_and_what_to_set() -> None:
    assert str(beyond_blocks_problem("steps have one width only")) == (
        "DFLASH_SGLANG_CONFIG copy=64: expected 'block', because steps have one width only. Set it to 'block'."
    )
