"""The servers of a comparison: the same flags and environment but for what makes each one of its kind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dflash_sglang.bench import kinds
from dflash_sglang.bench.kinds import OURS, PLAIN
from dflash_sglang.bench.settings import Served, Settings
from dflash_sglang.demo.server import Server, free_port


def flags(settings: Settings, served: Served) -> list[str]:
    """Arguments of `python -m sglang.launch_server`, without its port."""
    most = str(max((*settings.concurrency, *settings.profile)))
    out = ["--model-path", settings.target, "--max-running-requests", most]
    # DFLASH would otherwise delay admissions until several slots are free.
    out += ["--min-free-slots-delay", "1", "--max-total-tokens", str(settings.max_total_tokens)]
    if settings.gpu:
        out += ["--cuda-graph-max-bs-decode", most]
    else:
        out += ["--device", "cpu", "--dtype", settings.dtype, "--sleep-on-idle"]
    if settings.mem_fraction is not None:
        out += ["--mem-fraction-static", str(settings.mem_fraction)]
    if served.kind != PLAIN:
        out += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", settings.draft]
        if served.width is not None:
            out += ["--speculative-dflash-block-size", str(served.width)]
        out += settings.dflash_flags
    return [*out, *(settings.ours_flags if served.kind == OURS else ()), *settings.flags]


def environment(settings: Settings, served: Served) -> dict[str, str]:
    """What a server's environment has beside the inherited one."""
    out = {**kinds.environment(served.kind, chooses=served.width is None), "PYTHONUNBUFFERED": "1"}
    if not settings.gpu:
        out |= {"SGLANG_PLATFORM": "dflash_cpu", "OMP_NUM_THREADS": "1"}
    if settings.accept_length is not None and served.kind != PLAIN:
        out["SGLANG_SIMULATE_ACC_LEN"] = str(settings.accept_length)
    return out


def server_of(settings: Settings, served: Served) -> Server:
    """A server on a free port, not started yet, whose log stays beside the results."""
    port = free_port()
    return Server(
        [sys.executable, "-m", "sglang.launch_server", *flags(settings, served), "--port", str(port)],
        port=port,
        environment={**os.environ, **environment(settings, served)},
        log=log_of(settings.out, served),
    )


def log_of(out: Path, served: Served) -> Path:
    """Where a server's log goes; its directory is made."""
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{served.slug}.log"
