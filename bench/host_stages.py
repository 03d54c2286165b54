"""Wall-clock time of the scheduler's thread in each stage of a decode step, taken inside of the scheduler process.

A plugin of SGLang: `installed(directory)` gives the environment of a server that writes `directory`/stages.json
whenever it has become idle. A stage's time is its own: what a stage below it took is not in it. On a GPU launches
return before the kernels run, and "wait" is where the host waits for them.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import plugin

DIRECTORY_ENV = "DFLASH_BENCH_HOST_STAGES"
PLUGIN = "dflash_bench_host_stages"
WORKER, SGLANG, FORWARD, WAIT = "worker", "sglang", "forward", "wait"
# Where there is no GPU, a forward's operators run in the call, between what SGLang does for it.
MODEL = SGLANG if torch.cuda.is_available() else FORWARD
_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
# (owner of the stage's time, qualified name), in the order of a step.
STAGES: tuple[tuple[str, str], ...] = (
    (SGLANG, f"{_SCHEDULER}.Scheduler.ingest_requests"),
    (SGLANG, f"{_SCHEDULER}.Scheduler.get_next_batch_to_run"),
    (SGLANG, f"{_BATCH}.ScheduleBatch.filter_batch"),
    (SGLANG, f"{_BATCH}.ScheduleBatch.check_decode_mem"),
    (SGLANG, f"{_BATCH}.ScheduleBatch.prepare_for_decode"),
    (WORKER, "dflash_sglang.drafting.draft_input.DFlashDraftInput.prepare_for_decode"),
    (WORKER, "sglang.srt.speculative.dflash_info_v2.DFlashDraftInputV2.prepare_for_decode"),
    (WORKER, "dflash_sglang.drafting.draft_input.SlotReservation.reserve"),
    (SGLANG, "dflash_sglang.drafting.draft_input.alloc_for_spec_decode"),
    (SGLANG, "sglang.srt.speculative.dflash_info_v2.alloc_for_spec_decode"),
    (SGLANG, f"{_SCHEDULER}.Scheduler.run_batch"),
    (SGLANG, "sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu"),
    (SGLANG, f"{_SCHEDULER}.resolve_forward_inputs"),
    (SGLANG, f"{_SCHEDULER}.Scheduler.record_batch_in_overlap"),
    (WORKER, "dflash_sglang.worker.DFlashWorker.forward_batch_generation"),
    (WORKER, "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2.forward_batch_generation"),
    (WORKER, "dflash_sglang.drafting.block.BlockBuilder.build"),
    (WORKER, "dflash_sglang.drafting.block.prepare_block"),
    (SGLANG, "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan"),
    (WORKER, "dflash_sglang.drafting.proposer.Proposer.propose"),
    (WORKER, "dflash_sglang.drafting.proposer.Proposer._forward_batch"),
    (FORWARD, "dflash_sglang.drafting.proposer.Proposer._write_tokens"),
    (MODEL, "sglang.srt.model_executor.model_runner.ModelRunner.forward"),
    (SGLANG, "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.load_batch"),
    (FORWARD, "torch.cuda.graphs.CUDAGraph.replay"),
    (WORKER, "dflash_sglang.verify.verifier.Verifier.verify"),
    (WORKER, "dflash_sglang.verify.verifier.Verifier._forward"),
    (SGLANG, "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify"),
    (SGLANG, "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"),
    (SGLANG, "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"),
    (WORKER, "dflash_sglang.verify.verifier.Verifier._accept"),
    (SGLANG, "sglang.srt.managers.overlap_utils.FutureMap.publish"),
    (FORWARD, "dflash_sglang.models.context_kv.projection.ContextKV.write"),
    (FORWARD, "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc"),
    (WORKER, "dflash_sglang.drafting.draft_input.DFlashDraftInput.create"),
    (SGLANG, f"{_SCHEDULER}.Scheduler._relay_forward_payload"),
    (SGLANG, f"{_SCHEDULER}.Scheduler._copy_result_to_cpu"),
    (SGLANG, f"{_SCHEDULER}.Scheduler.process_batch_result"),
    (SGLANG, f"{_RESULTS}._resolve_spec_v2_tokens"),
    (WORKER, f"{_BATCH}.Req.update_finish_state"),
    (SGLANG, "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"),
)


class Clock:
    """Own time of nested stages, by iteration of the scheduler's loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = threading.get_ident()
        self._stack: list[int] = []  # of each open stage: what the stages below it have taken, ns
        self._times: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)
        self._size = self._last_size = 0
        self._started = time.perf_counter_ns()
        self._iterations: dict[int, list[dict[str, int]]] = defaultdict(list)
        self._counted: dict[int, dict[str, int]] = {}
        self._written = 0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            start = time.perf_counter_ns()
            self._stack.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                below = self._stack.pop()
                took = time.perf_counter_ns() - start
                self._times[name] += took - below
                self._calls[name] += 1
                if self._stack:
                    self._stack[-1] += took

        return run

    def decodes(self, batch: Any) -> None:
        """The iteration runs this batch."""
        self._size = len(batch.reqs) if batch.forward_mode.is_decode() else -1

    def turn(self) -> None:
        """An iteration ends, another begins."""
        now = time.perf_counter_ns()
        if self._size > 0 and self._size == self._last_size:  # a neighbour of the same kind: nothing of a prefill
            self._iterations[self._size].append({**self._times, "whole": now - self._started})
            self._counted[self._size] = dict(self._calls)
        elif self._size == 0 and (seen := sum(map(len, self._iterations.values()))) > self._written:
            self._write()
            self._written = seen
        self._times.clear()
        self._calls.clear()
        self._last_size, self._size, self._started = self._size, 0, time.perf_counter_ns()

    def _write(self) -> None:
        """{batch size: {"steps", "whole" and {stage: microseconds, the median}, "calls": {stage: of one step}}}"""
        report = {
            size: {
                "steps": len(steps),
                "whole": _median(steps, "whole"),
                "stages": {name: _median(steps, name) for name in sorted(set().union(*steps) - {"whole"})},
                "calls": self._counted[size],
            }
            for size, steps in self._iterations.items()
        }
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        partial.rename(self._path)


def _median(steps: list[dict[str, int]], name: str) -> float:
    return round(statistics.median(step.get(name, 0) for step in steps) / 1000, 1)


def installed(directory: Path) -> dict[str, str]:
    """The environment of a server whose scheduler writes `directory`/stages.json."""
    return {
        "PYTHONPATH": plugin.installed(directory, {PLUGIN: "bench.host_stages"}),
        DIRECTORY_ENV: str(directory),
    }


def activate() -> None:
    """Entry point: puts the clock into the scheduler, before it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        f"{_SCHEDULER}.Scheduler.init_memory_pools", lambda scheduler: _instrument(), HookType.BEFORE
    )


def _instrument() -> None:
    clock = Clock(Path(os.environ[DIRECTORY_ENV]) / "stages.json")
    from sglang.srt.managers.scheduler import Scheduler

    for kind, name in STAGES:
        owner, attribute = _resolve(name)
        if owner is None:
            continue
        found = inspect.getattr_static(owner, attribute)
        function = getattr(found, "__func__", found)
        timed = clock.timed(f"{kind}: {stage_of(name)}", function)
        setattr(owner, attribute, type(found)(timed) if function is not found else timed)
    run_batch, ingest = Scheduler.run_batch, Scheduler.ingest_requests

    def run_batch_noted(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        clock.decodes(batch)
        return run_batch(self, batch, *args, **kwargs)

    def ingest_after_turn(self: Any) -> Any:
        clock.turn()
        return ingest(self)

    Scheduler.run_batch, Scheduler.ingest_requests = run_batch_noted, ingest_after_turn
    wait = "synchronize"
    if torch.cuda.is_available():
        setattr(torch.cuda.Event, wait, clock.timed(f"{WAIT}: Event.{wait}", torch.cuda.Event.synchronize))
        setattr(torch.cuda.Stream, wait, clock.timed(f"{WAIT}: Stream.{wait}", torch.cuda.Stream.synchronize))


def stage_of(name: str) -> str:
    return ".".join(name.rsplit(".", 2)[1:])


def _resolve(name: str) -> tuple[Any, str]:
    """The object that has the last part of a dotted name, and that part; None where a module is not loaded."""
    path, attribute = name.rsplit(".", 1)
    for candidate in (path, path.rsplit(".", 1)[0]):
        if candidate in sys.modules:
            owner = sys.modules[candidate]
            return (owner if candidate == path else getattr(owner, path.rsplit(".", 1)[1])), attribute
    return None, attribute
