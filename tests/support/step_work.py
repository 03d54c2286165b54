"""Records what the host does for a step, inside the scheduler process of a server under test.

A plugin of SGLang like `scheduler_hooks`: `recorded(directory)` gives the environment of a server whose scheduler
writes `directory`/work.jsonl, one line for each prefill, which `prefills` reads, and for each decode step, which
`steps` reads. Observed is this package's own code: the draft input's preparation and the worker's step, without
model forwards, SGLang's allocator and the CPU platform.

On a GPU, with `synchronising=True`, torch itself reports each call that waits for the device instead.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dflash_sglang
from tests.support import scheduler_hooks, seam

DIRECTORY_ENV = "DFLASH_TEST_STEP_WORK"
SYNCHRONISING_ENV = "DFLASH_TEST_SYNCHRONISING"
PACKAGE = str(Path(dflash_sglang.__file__).parent)
CPU_PLATFORM = (f"{PACKAGE}/platforms/", f"{PACKAGE}/attention/")
# What waits for the device where a tensor is on one. `numpy` is no such call: it refuses a tensor on a device.
WAITING_METHODS = {"Tensor.tolist", "Tensor.item", "Tensor.cpu"}
WAITING_OPERATORS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero"}
SIZED_BY_VALUES = {"repeat_interleave"}  # where neither an int nor the size of the result is given
VIEWS = set("view _unsafe_view flatten slice select expand squeeze unsqueeze numpy_T detach".split())
MASKED = {"index", "index_put_", "index_put", "_index_put_impl_"}


@dataclass
class Work:
    """One step."""

    requests: int
    prefill: bool = False
    operators: Counter[str] = field(default_factory=Counter)  # of torch, but for those that only make a view
    calls: Counter[str] = field(default_factory=Counter)  # of this package's functions
    loops: list[str] = field(default_factory=list)  # places of this package that went over the batch's requests
    waits: list[str] = field(default_factory=list)  # places of this package that would wait for a device
    from_host: int = 0  # elements of the tensors that were made of Python's numbers


def recorded(directory: Path, synchronising: bool = False, **environment: str) -> dict[str, str]:
    """The environment of a server of ours that writes its steps' work into `directory`."""
    flags = {SYNCHRONISING_ENV: "1"} if synchronising else {}
    environment = {DIRECTORY_ENV: str(directory), **flags, **environment}
    return scheduler_hooks.hooked(directory, "", "support.step_work", **environment)


def steps(directory: Path, requests: int) -> list[Work]:
    """The decode steps of batches of so many requests, those that have ended so far."""
    return [work for work in _noted(directory) if work.requests == requests and not work.prefill]


def prefills(directory: Path) -> list[Work]:
    """Those that have ended so far."""
    return [work for work in _noted(directory) if work.prefill]


def _noted(directory: Path) -> list[Work]:
    return [Work(**row) for row in scheduler_hooks.noted(directory, "work.jsonl")]


def activate() -> None:
    """Entry point in a scheduler: records its steps from the time it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", _record, HookType.BEFORE)


def _record(scheduler: Any) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.drafting import draft_input
    from dflash_sglang.drafting.replays import Replay

    path = Path(os.environ[DIRECTORY_ENV]) / "work.jsonl"
    recorder = (_Synchronising if SYNCHRONISING_ENV in os.environ else _Recorder)(path)
    attention = type(scheduler.tp_worker.model_runner.attn_backend)
    for owner, name in (
        (ModelRunner, "forward"),
        (Replay, "run"),
        (draft_input, "alloc_for_spec_decode"),
        (attention, "init_forward_metadata"),
    ):
        setattr(owner, name, recorder.left_out(getattr(owner, name)))
    seam.wrap("context", recorder.left_out)
    seam.wrap("decode", lambda call: recorder.observed(call, ends=True))
    seam.wrap("whole prefill", lambda call: recorder.observed(call, ends=True, prefill=True))
    seam.wrap("next step", lambda call: recorder.observed(call, ends=False))


class _Requests(list):
    """A batch's requests; notes who goes over them."""

    recorder: _Recorder

    def __iter__(self) -> Iterator[Any]:
        place = _place(sys._getframe(1))
        if place is not None:
            self.recorder.work.loops.append(place)
        return super().__iter__()


class _Recorder(TorchDispatchMode):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("w", buffering=1)
        self._muted = 0
        self.work = Work(0)

    def left_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._muted += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._muted -= 1

        return run

    def observed(self, function: Callable[..., Any], ends: bool, prefill: bool = False) -> Callable[..., Any]:
        """`ends`: it is the last part of a step."""

        @functools.wraps(function)
        def run(owner: Any, batch: Any, *args: Any) -> Any:
            reqs = batch.reqs
            self.work.requests, self.work.prefill = len(reqs), prefill
            with self._observing():
                batch.reqs = _Requests(reqs)
                batch.reqs.recorder = self
                try:
                    result = function(owner, batch, *args)
                finally:
                    batch.reqs = reqs
            if ends:
                print(json.dumps(vars(self.work)), file=self._file)
                self.work = Work(0)
            return result

        return run

    @contextmanager
    def _observing(self) -> Iterator[None]:
        with self:
            sys.setprofile(self._on_event)
            try:
                yield
            finally:
                sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._muted:
            return
        if event == "call" and is_ours(frame):
            self.work.calls[frame.f_code.co_qualname] += 1
        elif event == "c_call" and getattr(argument, "__qualname__", "") in WAITING_METHODS and is_ours(frame):
            self.work.waits.append(f"{_place(frame)}: {argument.__qualname__}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._muted:
            name = func.overloadpacket.__name__
            if name not in VIEWS:
                self.work.operators[name] += 1
            if name == "lift_fresh":
                self.work.from_host += args[0].numel()
            caller = _caller()
            if caller is not None and _waits(name, args, kwargs):
                self.work.waits.append(f"{caller}: {name}")
        return func(*args, **kwargs)


class _Synchronising(_Recorder):
    """Lets torch say which calls of a step wait for the GPU."""

    @contextmanager
    def _observing(self) -> Iterator[None]:
        def note(message: Any, *_: Any, **__: Any) -> None:
            caller = _caller()
            if "synchroniz" in str(message) and caller is not None and not self._muted:
                self.work.waits.append(f"{caller}: {message}")

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    if name in SIZED_BY_VALUES:
        return kwargs.get("output_size") is None and any(isinstance(value, torch.Tensor) for value in args[1:2])
    if name in MASKED:
        from_host = len(args) > 2 and args[2].dim() == 0  # a number, or what a single request is given
        return from_host or any(index is not None and index.dtype == torch.bool for index in args[1])
    return name in WAITING_OPERATORS


def is_ours(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(PACKAGE) and not path.startswith(CPU_PLATFORM)


def _place(frame: FrameType) -> str | None:
    """The function of this package that the frame runs, if any."""
    return frame.f_code.co_qualname.split(".<locals>")[0] if is_ours(frame) else None


def _caller() -> str | None:
    """The function of this package that is nearest on the stack, where SGLang's code is not nearer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_ours(frame):
            return _place(frame)
        if "/sglang/" in frame.f_code.co_filename or frame.f_code.co_filename.startswith(CPU_PLATFORM):
            return None
        frame = frame.f_back
    return None
