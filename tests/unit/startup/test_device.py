"""A launch on a machine without a GPU names this package's CPU platform."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_sglang import hooks
from dflash_sglang.startup import device_check
from dflash_sglang.startup.facts import StartupError


@pytest.mark.parametrize(("algorithm", "platform", "found", "refused"), [
    ("DFLASH", "unknown", None, True), ("DFLASH", "unknown", "cpu", True), ("DFLASH", "dflash_cpu", "cpu", False),
    ("DFLASH", "cuda", "cuda", False), (None, "unknown", "cpu", False),
])  # fmt: skip
def test_dflash_without_a_gpu_is_refused_by_the_name_of_the_variable_and_other_launches_are_left_alone(
    algorithm: str | None, platform: str, found: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get_device() -> str:
        if found is None:
            raise RuntimeError("No accelerator")
        return found

    monkeypatch.setattr(device_check, "current_platform", SimpleNamespace(device_name=platform))
    monkeypatch.setattr(device_check, "get_device", get_device)
    for asked in (None, "cpu") if refused else (None,):
        seen: list[Any] = []
        arguments = SimpleNamespace(
            speculative_algorithm=algorithm, enable_return_aux_hidden_states=False, device=asked
        )
        said = r"--device=.*set SGLANG_PLATFORM=dflash_cpu and add --device cpu"
        with pytest.raises(StartupError, match=said) if refused else contextlib.nullcontext():
            hooks.handle_missing_default_values(seen.append, arguments)
        assert seen == ([] if refused else [arguments])
