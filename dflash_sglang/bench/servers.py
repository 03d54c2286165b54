"""The servers of a comparison: the same flags and environment but for what makes each one of its kind."""

from __future__ import annotations

from dflash_sglang.bench.settings import Served, Settings
from dflash_sglang.demo import launch
from dflash_sglang.demo.launch import OURS, PLAIN
from dflash_sglang.demo.server import Server


def flags(settings: Settings, served: Served) -> list[str]:
    """Arguments of `python -m sglang.launch_server`, without its port."""
    most = str(max((*settings.concurrency, *settings.profile)))
    # DFLASH would otherwise delay admissions until several slots are free.
    out = ["--max-running-requests", most, "--min-free-slots-delay", "1"]
    out += ["--max-total-tokens", str(settings.max_total_tokens)]
    if settings.gpu:
        out += ["--cuda-graph-max-bs-decode", most]
    else:
        out += [*launch.ON_CPU, "--sleep-on-idle"]
    if settings.mem_fraction is not None:
        out += ["--mem-fraction-static", str(settings.mem_fraction)]
    width = [] if served.width is None else ["--speculative-dflash-block-size", str(served.width)]
    out += launch.model_flags(served.kind, settings.target, settings.draft, [*width, *settings.dflash_flags])
    return [*out, *(settings.ours_flags if served.kind == OURS else ()), *settings.flags]


def environment(settings: Settings, served: Served) -> dict[str, str]:
    """What a server's environment has beside the inherited one."""
    out = launch.environment(served.kind, cpu=not settings.gpu, chooses=served.width is None)
    if settings.accept_length is not None and served.kind != PLAIN:
        out["SGLANG_SIMULATE_ACC_LEN"] = str(settings.accept_length)
    return out


def server_of(settings: Settings, served: Served) -> Server:
    """A server on a free port, not started yet, whose log stays beside the results."""
    log = settings.out / "logs" / f"{served.slug}.log"
    return launch.new_server(flags(settings, served), environment=environment(settings, served), log=log)
