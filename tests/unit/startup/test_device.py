"""A launch on a machine without a GPU names this package's CPU platform."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang import hooks
from dflash_sglang.startup import device_check
from dflash_sglang.startup.facts import StartupError


def no_device() -> str:
    raise RuntimeError("No accelerator")


@pytest.mark.parametrize("asked", [None, "cpu"])
@pytest.mark.parametrize("device", ["none", "in-tree"])
def test_dflash_without_a_gpu_is_refused_by_the_name_of_the_variable(
    asked: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "current_platform", SimpleNamespace(device_name="unknown"))
    monkeypatch.setattr(device_check, "get_device", no_device if device == "none" else lambda: "cpu")
    arguments = SimpleNamespace(
        speculative_algorithm="DFLASH", enable_return_aux_hidden_states=False, device=asked
    )
    with pytest.raises(StartupError, match=r"--device=.*set SGLANG_PLATFORM=dflash_cpu and add --device cpu"):
        hooks.handle_missing_default_values(lambda _: None, arguments)


@pytest.mark.parametrize(
    ("algorithm", "platform", "found"),
    [("DFLASH", "dflash_cpu", "cpu"), ("DFLASH", "cuda", "cuda"), (None, "unknown", "cpu")],
)
def test_other_launches_are_left_to_sglang(
    algorithm: str | None, platform: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_check, "current_platform", SimpleNamespace(device_name=platform))
    monkeypatch.setattr(device_check, "get_device", lambda: found)
    seen: list[Any] = []
    arguments = SimpleNamespace(
        speculative_algorithm=algorithm, enable_return_aux_hidden_states=False, device=None
    )
    hooks.handle_missing_default_values(seen.append, arguments)
    assert seen == [arguments]
