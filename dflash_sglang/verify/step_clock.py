"""When launched work ends, and how long it took."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Marks the end of what was launched last: on a GPU the stream's, whenever the host comes to read it; on a CPU
    the present."""

    def __init__(self, device: str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks, once both are reached."""
        if not self._on_gpu:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000
