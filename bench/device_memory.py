"""Memory of the device at start-up and in every step, taken inside of the scheduler process.

A plugin of SGLang: `installed(directory)` gives the environment of a server whose first rank writes one JSON
object a line to `directory`/memory.jsonl; `lines` reads it. Figures are bytes; without a GPU they are 0.

| at | when | fields |
|---|---|---|
| sizing | the models are loaded, the KV pools come next | slack: what SGLang leaves free of them |
| sized | the KV pools are there | |
| ready | start-up is over | chunk: tokens of a prefill, at most; requests: at a time; block |
| step | a forward was launched | mode, requests, tokens, width; allocated at its start: before; since: peak |

All have `free` (of the device), `allocated` and `reserved` (of this process, by torch). A step that prefills while
no request runs has `alone`, too: what is allocated once garbage is collected and the device has caught up.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import plugin

DIRECTORY_ENV = "DFLASH_BENCH_DEVICE_MEMORY"
PLUGIN = "dflash_bench_device_memory"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_FILE = "memory.jsonl"
GB = 1 << 30


def installed(directory: Path) -> dict[str, str]:
    """The environment of a server whose scheduler writes `directory`/memory.jsonl."""
    return {
        "PYTHONPATH": plugin.installed(directory, {PLUGIN: "bench.device_memory"}),
        DIRECTORY_ENV: str(directory),
    }


def lines(directory: Path) -> list[dict[str, Any]]:
    """What was written so far."""
    return [json.loads(line) for line in (directory / _FILE).read_text().splitlines()]


def activate() -> None:
    """Entry point: watches the scheduler from before its KV pools on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method, around in (
        ("init_memory_pools", _pools),
        ("init_model_worker", _start_up),
        ("run_batch", _step),
    ):
        HookRegistry.register(f"{_SCHEDULER}.{method}", around, HookType.AROUND)


def _pools(make: Callable[..., Any], scheduler: Any) -> Any:
    from sglang.srt.runtime_context import get_schedule

    runner = scheduler.tp_worker.model_runner
    _collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # as SGLang does before it reads what is free
    slack = runner.pre_model_load_memory * (1 - get_schedule().mem_fraction_static) * GB
    _write("sizing", slack=int(slack))
    made = make(scheduler)
    _write("sized")
    return made


def _start_up(start: Callable[..., Any], scheduler: Any) -> Any:
    from sglang.srt.runtime_context import get_schedule, get_spec

    started = start(scheduler)
    _collect()
    _write(
        "ready",
        chunk=get_schedule().chunked_prefill_size,
        requests=scheduler.tp_worker.model_runner.max_running_requests,
        block=get_spec().speculative_num_draft_tokens,
    )
    return started


def _step(run: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    mode, requests, alone = batch.forward_mode, len(batch.reqs), {}
    tokens = sum(batch.extend_lens) if mode.is_extend() else 0
    if mode.is_extend() and scheduler.running_batch.is_empty():
        _collect()
        alone = {"alone": _figures()["allocated"]}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    before = _figures()["allocated"]
    result = run(scheduler, batch, *args, **kwargs)
    width = getattr(scheduler.draft_worker, "width", None) or getattr(result, "speculative_num_draft_tokens", 1)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    shape = dict(mode=mode.name, requests=requests, tokens=tokens or requests * width, width=width)
    _write("step", **shape, before=before, peak=peak, **alone)
    return result


def _collect() -> None:
    """Nothing that is garbage, or waits for a stream, counts as allocated."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # torch frees what streams were done with when memory is asked for


def _figures() -> dict[str, int]:
    if not torch.cuda.is_available():
        return dict.fromkeys(("free", "allocated", "reserved"), 0)
    free, _ = torch.cuda.mem_get_info()
    return dict(free=free, allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved())


def _write(at: str, **more: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == 0:
        with (Path(os.environ[DIRECTORY_ENV]) / _FILE).open("a") as file:
            file.write(json.dumps(dict(at=at, **more, **_figures())) + "\n")
