"""Whether there is a device that DFLASH runs on."""

from __future__ import annotations

from dflash_sglang.sglang_names.launcher import current_platform, get_device
from dflash_sglang.startup.facts import Problem, StartupError

PLATFORM = "dflash_cpu"


def check_device(asked: str | None) -> None:
    """Raise StartupError where a CPU would be the device, without this package's platform. asked: --device."""
    if current_platform.device_name == PLATFORM:
        return
    found = asked
    if asked is None:
        try:
            found = get_device()
        except RuntimeError:  # SGLang finds none
            found = "cpu"
    if found is not None and found.startswith("cpu"):
        expected = "a GPU" if asked else "a machine with a GPU, found none"
        fix = f"For a try on a CPU, set SGLANG_PLATFORM={PLATFORM} and add --device cpu --dtype float32."
        raise StartupError([Problem("--device", asked, expected, fix)])
