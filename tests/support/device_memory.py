"""Memory of the device in every step, taken inside of the scheduler process.

A plugin beside `scheduler_hooks`, installed by `hooked(directory, hooks, "support.device_memory")`. The first rank
writes a JSON object for each step to `memory.jsonl` of the records' directory; `lines` reads it. Bytes of this
process, by torch: before a step (`before`), at its peak (`peak`) and held of the device after it (`reserved`). A
step that prefills while no request runs has `alone`, too: what is allocated once garbage is collected and the
device has caught up.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.scheduler_hooks import RECORDS_ENV

_FILE = "memory.jsonl"


def lines(directory: Path) -> list[dict[str, Any]]:
    """What was written so far."""
    return [json.loads(line) for line in (directory / _FILE).read_text().splitlines()]


def activate() -> None:
    """Entry point: watches the scheduler's steps."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", _step, HookType.AROUND)


def _step(run: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    line: dict[str, Any] = {"requests": len(batch.reqs)}
    if batch.forward_mode.is_extend() and scheduler.running_batch.is_empty():
        gc.collect()
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")  # torch frees what streams were done with when memory is asked for
        line["alone"] = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    line["before"] = torch.cuda.memory_allocated()
    result = run(scheduler, batch, *args, **kwargs)
    line |= {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    if get_parallel().tp_rank == 0:
        with (Path(os.environ[RECORDS_ENV]) / _FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return result
