"""The CPU platform. SGLang loads its entry point while it is being imported itself: nothing of it is here."""

import os

NAME = "dflash_cpu"


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`.

    Returns the platform class's qualified name when `SGLANG_PLATFORM` selects it, else None: without the
    variable SGLang activates every installed platform, and a machine with a GPU must keep its own.
    """
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    return f"{__name__}.platform.CpuPlatform"
