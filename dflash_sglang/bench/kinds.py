"""The kinds of servers that are compared, what makes one of a kind, and the proof of which worker ran."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from dflash_sglang import __version__
from dflash_sglang.demo.server import Server, ServerFailed
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig, decoded

PLAIN, BUILT_IN, OURS = "plain", "built_in", "ours"
# What a DFLASH worker writes into the log once it is up.
SIGNATURE: Mapping[str, str] = {
    BUILT_IN: "Initialized DFLASH draft runner",
    OURS: f"dflash_sglang {__version__} worker active",
}
READY_TIMEOUT = 1800.0  # seconds; a first start compiles kernels, and large checkpoints load for long


def environment(kind: str, chooses: bool = False) -> dict[str, str]:
    """What a server of a kind has in its environment beside the inherited one.

    Our worker serves the block's width, as the built-in one does, unless it `chooses` or the inherited
    DFLASH_SGLANG_CONFIG has a width. Raises PluginConfigError where that cannot be read.
    """
    if kind != OURS:
        return {"SGLANG_PLUGINS": "none"}
    out = {"DFLASH_SGLANG_REQUIRE": "1"}
    return out if chooses else {**out, CONFIG_ENV: _with_a_width(os.environ.get(CONFIG_ENV, ""))}


@functools.cache  # a file is read once, so that a report tells what its servers had
def _with_a_width(settings: str) -> str:
    """These settings, inline JSON or a file's, with the block's width where they have none."""
    values: Any = decoded(settings)
    PluginConfig.from_mapping(values)
    return json.dumps({"width": "block", **values})


def wait_for(kind: str, server: Server, on_wait: Callable[[], None] = lambda: None) -> None:
    """Returns once a started server is ready; calls `on_wait` meanwhile.

    Raises ServerFailed when it does not become ready, or when its log shows another kind's worker.
    """
    server.wait_ready(READY_TIMEOUT, on_wait)
    try:
        assert_worker(kind, server.log_text())
    except ServerFailed as error:
        raise ServerFailed(f"{error} ({server.log})") from None


def assert_worker(kind: str, log: str) -> None:
    """The log must hold the line that only this kind's worker writes, and none of another's; else ServerFailed."""
    for other, line in SIGNATURE.items():
        if (line in log) != (other == kind):
            verb = "has" if line in log else "lacks"
            raise ServerFailed(f"{kind}: another worker runs than expected, the log {verb} {line!r}")


def worker_line(log: str) -> str:
    """The line with which the DFLASH worker of a log presents itself; empty without one."""
    lines = [line for line in log.splitlines() if any(one in line for one in SIGNATURE.values())]
    return lines[0] if lines else ""
