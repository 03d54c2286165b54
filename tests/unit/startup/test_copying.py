"""Which launches propose copies, and why others do not."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_sglang.settings.plugin_config import PluginConfig, PluginConfigError
from dflash_sglang.startup.copying import copies_in_words, renamed_slots_problem


@pytest.mark.parametrize(
    ("settings", "without_tokens", "words"),
    [
        ({}, None, 'off (copy is "off")'),
        ({"copy": "off"}, "--enable-hierarchical-cache", 'off (copy is "off")'),
        ({"copy": "block"}, None, "block"),
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
    with pytest.raises(PluginConfigError, match=r"copy='all' \(str\): expected one of off, block"):
        PluginConfig.from_mapping({"copy": "all"})


def test_pools_that_rename_slots_are_refused_with_the_setting() -> None:
    assert str(renamed_slots_problem()) == (
        "DFLASH_SGLANG_CONFIG copy='block': expected 'off' with KV pools that rename slots. Leave it out."
    )
