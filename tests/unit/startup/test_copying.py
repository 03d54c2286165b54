"""Which launches propose copies, and why others do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.settings.plugin_config import PluginConfig, PluginConfigError
from dflash_sglang.startup import copying

PLAIN, MTP = object.__new__(DraftSpec), object.__new__(MtpSpec)
WITH_TOKENS: dict[str, Any] = dict(hierarchical_cache=False, mode="null", length=-1.0)


def config_of(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], **launch: Any) -> PluginConfig:
    of = WITH_TOKENS | launch
    memory = SimpleNamespace(enable_hierarchical_cache=of["hierarchical_cache"])
    monkeypatch.setattr(copying, "get_memory", lambda: memory)
    monkeypatch.setattr(copying, "SIMULATE_ACC_LEN", of["length"])
    monkeypatch.setattr(copying, "get_disagg", lambda: SimpleNamespace(disaggregation_mode=of["mode"]))
    return PluginConfig.from_mapping(settings)


@pytest.mark.parametrize(
    ("settings", "launch", "reason"),
    [
        ({}, {}, None),
        ({"copy": "off"}, {"hierarchical_cache": True}, 'copy is "off"'),
        ({"copy": "block"}, {}, None),
        ({"copy": 64}, {}, None),
        ({}, {"hierarchical_cache": True}, "--enable-hierarchical-cache brings KV without its tokens"),
        ({"copy": "block"}, {"length": 6.4}, "acceptance is forced, whatever is proposed"),
        ({}, {"mode": "decode"}, None),
        ({"copy": "block"}, {"mode": "prefill"}, "another server decodes"),
    ],
)
def test_copies_are_proposed_where_asked_for_and_where_tokens_of_slots_are_known(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], launch: dict[str, Any], reason: str | None
) -> None:
    assert copying.why_no_copies(config_of(monkeypatch, settings, **launch), PLAIN) == reason


def test_nothing_is_copied_with_multi_token_prediction_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(monkeypatch, {})
    assert copying.why_no_copies(config, MTP) == "no test copies with multi-token-prediction layers"
    assert copying.chains_of(config, MTP, 4) == {}


@pytest.mark.parametrize(
    ("copy", "block", "launch", "chains"),
    [
        (64, 16, {}, {32: 4, 64: 2}),
        ("auto", 32, {}, {64: 2}),
        (64, 64, {}, {}),
        (64, 16, {"hierarchical_cache": True}, {}),
        ("block", 16, {}, {}),
    ],
)
def test_chains_have_more_rows_than_a_block_and_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, copy: Any, block: int, launch: dict[str, Any], chains: dict[int, int]
) -> None:
    assert copying.chains_of(config_of(monkeypatch, {"copy": copy}, **launch), PLAIN, block) == chains


def test_another_value_is_refused_with_those_that_are_known() -> None:
    for value, shown in (("all", r"'all' \(str\)"), (32, r"32 \(int\)"), ("64", r"'64' \(str\)")):
        with pytest.raises(PluginConfigError, match=f"copy={shown}: expected one of auto, off, block, 64"):
            PluginConfig.from_mapping({"copy": value})


def test_more_rows_are_refused_with_the_reason() -> None:
    assert str(copying.more_rows_problem("steps have one width only")) == (
        "DFLASH_SGLANG_CONFIG copy=64: expected 'block', because steps have one width only. Set it to 'block'."
    )


def test_pools_that_rename_slots_are_refused_with_the_setting() -> None:
    assert str(copying.renamed_slots_problem("block")) == (
        "DFLASH_SGLANG_CONFIG copy='block': expected 'off' with KV pools that rename slots. Leave it out."
    )
