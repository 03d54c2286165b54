"""Entry point of SGLang's plugin group: registers the hooks. Imports nothing that could fail by itself."""

import os
from collections.abc import Callable
from typing import Any


def activate() -> None:
    """Registers the hooks.

    SGLang logs and swallows an exception raised here, and would run its built-in worker. With
    DFLASH_SGLANG_REQUIRE=1 it is turned into SystemExit, which ends the process.
    """
    try:
        _register()
    except Exception as error:
        if os.environ.get("DFLASH_SGLANG_REQUIRE", "").strip() in ("", "0"):
            raise
        raise SystemExit(
            f"DFLASH_SGLANG_REQUIRE=1: dflash_sglang cannot be activated, and the built-in worker would run: "
            f"{type(error).__name__}: {error}"
        ) from error


def _register() -> None:
    from dflash_sglang.hooks import create_worker, handle_speculative_decoding, hook_around, parse_config
    from dflash_sglang.patches.faults import create_watchdog, start_subprocess_watchdog, stop_subprocess_watchdog

    hooks: dict[str, Callable[..., Any]] = {
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker": create_worker,
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding": handle_speculative_decoding,
        "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse": parse_config,
        "sglang.srt.utils.watchdog.SubprocessWatchdog.start": start_subprocess_watchdog,
        "sglang.srt.utils.watchdog.SubprocessWatchdog.stop": stop_subprocess_watchdog,
        "sglang.srt.utils.watchdog.Watchdog.create": create_watchdog,
    }
    hook_around(hooks)
