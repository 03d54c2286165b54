"""Entry point of SGLang's plugin group: registers the hooks. Imports nothing that could fail by itself."""

import os


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
    from dflash_sglang.patches.apply import register
    from dflash_sglang.patches.refusals import print_messages_only

    print_messages_only()
    register("every")
