"""Launch SGLang servers: the one way in which the demo, the benches and the tests start one.

A comparison has servers of three kinds: without speculation, with SGLang's own DFLASH worker, with ours.
`model_flags` and `environment` make a server of a kind, `new_server` gives it a port and a log, and `wait_for`
returns once it is ready and its log proves which worker runs.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_sglang import __version__
from dflash_sglang.demo.server import Server, ServerFailed, free_port
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig, decoded

PLAIN, BUILT_IN, OURS = "plain", "built_in", "ours"
LAUNCH = ("-m", "sglang.launch_server")
# Flags and environment of a server on the CPU platform, in the type in which outputs can be compared for equality.
ON_CPU = ("--device", "cpu", "--dtype", "float32")
CPU_ENVIRONMENT: Mapping[str, str] = {"SGLANG_PLATFORM": "dflash_cpu"}
# What a DFLASH worker writes into the log once it is up; the built-in one of DSpark drafts, too.
SIGNATURE: Mapping[str, str] = {
    BUILT_IN: " draft runner. attention_backend=",
    OURS: f"dflash_sglang {__version__} worker active",
}
READY_TIMEOUT = 1800.0  # seconds; a first start compiles kernels, and large checkpoints load for long


def model_flags(kind: str, target: str, draft: str, draft_flags: Sequence[str] = ()) -> list[str]:
    """The flags that name the checkpoints, and turn DFLASH on where the kind speculates."""
    flags = ["--model-path", target]
    if kind == PLAIN:
        return flags
    return [
        *flags,
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", draft),
        *draft_flags,
    ]


def environment(kind: str, *, cpu: bool = False, chooses: bool = False) -> dict[str, str]:
    """What a server of a kind has in its environment beside the inherited one.

    Our worker serves the block's width, as the built-in one does, unless it `chooses` or the inherited
    DFLASH_SGLANG_CONFIG has a width. Raises PluginConfigError where that cannot be read.
    """
    out = dict(CPU_ENVIRONMENT) if cpu else {}
    if kind != OURS:
        return {**out, "SGLANG_PLUGINS": "none"}
    out["DFLASH_SGLANG_REQUIRE"] = "1"
    return out if chooses else {**out, CONFIG_ENV: _with_a_width(os.environ.get(CONFIG_ENV, ""))}


@functools.cache  # a file is read once, so that a report tells what its servers had
def _with_a_width(settings: str) -> str:
    """These settings, inline JSON or a file's, with the block's width where they have none."""
    values: Any = decoded(settings)
    PluginConfig.from_mapping(values)
    return json.dumps({"width": "block", **values})


def new_server(
    flags: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    port: int | None = None,
    program: Sequence[str] = LAUNCH,
    server_class: type[Server] | None = None,
) -> Server:
    """A server that `with` starts: `python program... flags... --port`, on a free port unless one is given.

    `environment` is what it has beside the inherited one. The directory of `log` is made.
    """
    port = free_port() if port is None else port
    log.parent.mkdir(parents=True, exist_ok=True)
    return (server_class or Server)(
        [sys.executable, *program, *flags, "--port", str(port)],
        port=port,
        environment={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        log=log,
    )


def wait_for(
    kind: str, server: Server, on_wait: Callable[[], None] = lambda: None, timeout: float = READY_TIMEOUT
) -> None:
    """Returns once a started server is ready; calls `on_wait` meanwhile.

    Raises ServerFailed when it does not become ready, or when its log shows another kind's worker.
    """
    server.wait_ready(timeout, on_wait)
    try:
        assert_worker(kind, server.log_text())
    except ServerFailed as error:
        hint = "; check that SGLANG_PLUGINS does not leave dflash_sglang out" if kind == OURS else ""
        raise ServerFailed(f"{error} ({server.log}){hint}") from None


def assert_worker(kind: str, log: str) -> None:
    """The log must hold the line that only this kind's worker writes, and none of another's; else ServerFailed."""
    for other, line in SIGNATURE.items():
        if (line in log) != (other == kind):
            verb = "has" if line in log else "lacks"
            raise ServerFailed(f"{kind}: another worker runs than expected, the log {verb} {line!r}")


def worker_line(log: str) -> str:
    """The line with which the DFLASH worker of a log presents itself, joined with the indented lines after it.

    Empty where no worker does.
    """
    lines = log.splitlines()
    for number, line in enumerate(lines):
        if any(one in line for one in SIGNATURE.values()):
            block = itertools.takewhile(lambda text: text.startswith("  "), lines[number + 1 :])
            return "; ".join([line, *map(str.strip, block)])
    return ""
