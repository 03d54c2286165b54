"""When launched work ends, and how long it took."""

from __future__ import annotations

import time
from typing import Any

import torch

MOST_DELAY = 0.02  # seconds
CYCLES = 2e9  # of a GPU in a second, at most about


class StepClock:
    """Marks the end of what was launched last: on a GPU the stream's, whenever the host comes to read it; on a CPU
    the present."""

    def __init__(self, device: str) -> None:
        # Whether the device is a GPU, which runs beside the host.
        self.on_gpu = torch.device(device).type == "cuda"

    def mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks, once both are reached."""
        if not self.on_gpu:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def delay(self, seconds: float) -> None:
        """Keep a GPU busy for about so long, up to `MOST_DELAY`: what is launched meanwhile then runs without a
        gap."""
        if self.on_gpu:
            torch.cuda._sleep(int(min(seconds, MOST_DELAY) * CYCLES))

    def waited(self, done: Any) -> bool:
        """Whether a GPU has reached the event `done` by now."""
        return self.on_gpu and done is not None and done.query()
