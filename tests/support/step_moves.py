"""Counts what a decode step moves outside of its graphs, inside the scheduler process of a server under test.

A plugin of SGLang like `scheduler_hooks`, for a CPU with `recorded_graphs`: the module's `activate()` makes the
scheduler write `moves.jsonl` into the directory of the replays, one line for each decode step; `steps` reads them.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import scheduler_hooks
from tests.support.recorded_graphs import DIRECTORY_ENV, Backend


@dataclass
class Moves:
    """Of one decode step, as SGLang's scheduler runs it: each of these is a launch or a copy on a GPU."""

    requests: int
    gathers: int = 0  # but for those of kernels, graphs and attention's metadata
    staged: int = 0  # tensors copied into inputs of graphs
    to_host: int = 0


def steps(directory: Path, requests: int) -> list[Moves]:
    """The steps of batches of so many requests, those that have ended so far."""
    found = [Moves(**row) for row in scheduler_hooks.noted(directory, "moves.jsonl")]
    return [moves for moves in found if moves.requests == requests]


def activate() -> None:
    """Entry point in a scheduler: counts its steps from the time it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", _count, HookType.BEFORE)


def _count(scheduler: Any) -> None:
    from sglang.srt.managers import utils
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.cuda_graph_buffer_registry import CudaGraphBufferRegistry

    from dflash_sglang.drafting import block
    from dflash_sglang.verify import step_result

    counter = _Counter(Path(os.environ[DIRECTORY_ENV]) / "moves.jsonl")
    for owner, name in (
        (Backend, "replay"),
        (block, "prepare_block"),
        (type(scheduler.tp_worker.model_runner.attn_backend), "init_forward_metadata"),
    ):
        setattr(owner, name, counter.left_out(getattr(owner, name)))
    CudaGraphBufferRegistry.fill_from = counter.staging(CudaGraphBufferRegistry.fill_from)
    utils._async_d2h = step_result.async_d2h = counter.to_host
    Scheduler.run_batch = counter.counted(Scheduler.run_batch)


class _Counter(TorchDispatchMode):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", buffering=1)
        self._moves: Moves | None = None
        self._left_out = 0
        self._host_slot: torch.Tensor | None = None  # while inputs are staged
        self._on_host: list[torch.Tensor] = []

    def counted(self, run_batch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run_batch)
        def run(scheduler: Any, batch: Any, *args: Any) -> Any:
            if not batch.forward_mode.is_decode():
                return run_batch(scheduler, batch, *args)
            self._moves, self._on_host = Moves(len(batch.reqs)), []
            with self:
                result = run_batch(scheduler, batch, *args)
            print(json.dumps(asdict(self._moves)), file=self._file)
            self._moves = None
            return result

        return run

    def left_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._not_counted():
                return function(*args, **kwargs)

        return run

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        self._left_out += 1
        try:
            yield
        finally:
            self._left_out -= 1

    def staging(self, fill_from: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fill_from)
        def run(registry: Any, *args: Any, **kwargs: Any) -> Any:
            self._host_slot = registry.get_slot("seq_lens_cpu").buffer
            try:
                return fill_from(registry, *args, **kwargs)
            finally:
                self._host_slot = None

        return run

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stands in for `async_d2h`, which copies nothing that is on the host."""
        if any(tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in self._on_host):
            return tensor
        if self._moves is not None:
            self._moves.to_host += 1
        self._on_host.append(tensor.clone())
        return self._on_host[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self._moves is not None and not self._left_out:
            self._moves.gathers += name in ("index", "index_select", "gather")
            to_slot = self._host_slot is not None and name == "copy_"
            self._moves.staged += to_slot and args[0].data_ptr() != self._host_slot.data_ptr()
        return func(*args, **(kwargs or {}))
