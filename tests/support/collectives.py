"""Records the collectives of every step, inside the scheduler processes of a server under test.

A plugin of SGLang like `scheduler_hooks`: `recorded(directory)` gives the environment of a server whose ranks
write `directory`/steps-RANK.jsonl, one line for each step of the worker, which `steps` reads. Observed are the
process groups themselves, under SGLang's group coordinators and `torch.distributed` alike.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support import scheduler_hooks, seam

DIRECTORY_ENV = "DFLASH_TEST_COLLECTIVES"
SENTINEL = 1234.5
# What a torch.distributed.ProcessGroup can be asked for.
OPERATIONS = """_allgather_base all_gather_single all_gather_single_coalesced all_to_all_single allgather
allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier
broadcast gather gather_into_tensor gather_single monitored_barrier recv recv_anysource reduce reduce_scatter
_reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter
send""".split()


class Collective(NamedTuple):
    issuer: str  # "draft", "target", or "worker" between their forwards
    operation: str
    group: str  # SGLang's name of it
    ranks: tuple[int, ...]
    tensors: tuple[str, ...]  # dtype and shape of each


@dataclass
class Step:
    """One call of the worker's `forward_batch_generation` on one rank."""

    mode: str  # "prefill", "decode" or "idle"
    others_prefill: bool  # of an idle rank: whether it keeps prefills company
    requests: int
    width: int = 0  # of a decode step's blocks, an IDLE rank's too
    collectives: list[Collective] = field(default_factory=list)
    issued: dict[str, int] = field(default_factory=dict)  # collectives by group, as the process groups count them
    changed: list[str] = field(default_factory=list)  # of an idle rank: what the step wrote or planned


def recorded(directory: Path, **environment: str) -> dict[str, str]:
    """The environment of a server of ours whose ranks write their steps into `directory`."""
    environment = {DIRECTORY_ENV: str(directory), **environment}
    return scheduler_hooks.hooked(directory, "", "support.collectives", **environment)


def steps(directory: Path, rank: int) -> list[Step]:
    """The steps that a rank has ended so far."""
    return [_step(row) for row in scheduler_hooks.noted(directory, f"steps-{rank}.jsonl")]


def all_ended(directory: Path, ranks: int) -> list[tuple[Step, ...]]:
    """All steps [steps][ranks], once every rank has ended the same number of them for a while: the server is at
    rest. Raises AssertionError where the ranks do not get there."""
    deadline, before = time.monotonic() + 30, None
    while time.monotonic() < deadline:
        of_ranks = [steps(directory, rank) for rank in range(ranks)]
        counts = [len(of_rank) for of_rank in of_ranks]
        if len(set(counts)) == 1 and counts == before:
            return list(zip(*of_ranks, strict=True))
        before = counts
        time.sleep(0.2)
    raise AssertionError(f"steps that each rank ended: {counts}")


def _step(written: dict[str, Any]) -> Step:
    collectives = [
        Collective(issuer, operation, group, tuple(ranks), tuple(tensors))
        for issuer, operation, group, ranks, tensors in written.pop("collectives")
    ]
    return Step(**written, collectives=collectives)


def activate() -> None:
    """Entry point in a scheduler: records its steps from the time it serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", _record, HookType.BEFORE)


def _record(scheduler: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    path = Path(os.environ[DIRECTORY_ENV]) / f"steps-{get_parallel().tp_rank}.jsonl"
    recorder = _Recorder(path)
    recorder.watch_groups()
    worker = scheduler.draft_worker
    target, source = type(worker.target_worker), worker._proposer
    for owner, method, issuer in (
        (source, "propose", "draft"),
        (source, "propose_idle", "draft"),
        (target, "forward_batch_generation", "target"),
    ):
        setattr(owner, method, recorder.issued_by(issuer, getattr(owner, method)))
    for point in ("context", "mtp rows of a prefill"):
        seam.wrap(point, lambda call: recorder.issued_by("draft", call))
    seam.wrap("batch", recorder.one_step)


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._issuer = "worker"
        self._step: Step | None = None

    def watch_groups(self) -> None:
        from sglang.srt.distributed import parallel_state

        coordinators = [reference() for reference in parallel_state._groups.values()]
        self._groups = {
            group.group_name: (f"{one.unique_name}{kind}", tuple(one.ranks), group)
            for one in coordinators
            if one is not None and one.world_size > 1
            for kind, group in (("", one.device_group), (" (cpu)", one.cpu_group))
        }
        for operation in OPERATIONS:
            issue = getattr(torch.distributed.ProcessGroup, operation)
            setattr(torch.distributed.ProcessGroup, operation, self._noting(operation, issue))

    def _noting(self, operation: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(issue)
        def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._step is not None and group.size() > 1:
                name, ranks, _ = self._groups[group.group_name]
                tensors = tuple(f"{x.dtype} {list(x.shape)}" for x in _tensors([*args, *kwargs.values()]))
                self._step.collectives.append(Collective(self._issuer, operation, name, ranks, tensors))
            return issue(group, *args, **kwargs)

        return noted

    def issued_by(self, issuer: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def labelled(*args: Any, **kwargs: Any) -> Any:
            outer, self._issuer = self._issuer, issuer
            try:
                return method(*args, **kwargs)
            finally:
                self._issuer = outer

        return labelled

    def one_step(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            mode = batch.forward_mode
            name = "idle" if mode.is_idle() else "prefill" if mode.is_extend() else "decode"
            step = self._step = Step(name, bool(batch.is_extend_in_batch), len(batch.reqs))
            before = self._counts()
            memory = _Memory(worker) if name == "idle" else None
            result = forward(worker, batch, *args, **kwargs)
            step.width = worker.width
            step.issued = {
                group: now - before[group] for group, now in self._counts().items() if now != before[group]
            }
            step.changed = memory.changed() if memory is not None else []
            self._step = None
            print(json.dumps(asdict(step)), file=self._file)
            return result

        return recorded

    def _counts(self) -> dict[str, int]:
        return {name: group._get_sequence_number_for_group() for name, _, group in self._groups.values()}


class _Memory:
    """Keys and values of both pools, the request table, and what the draft's attention has planned.

    Padding goes to the first page of a pool, and would find there what padding wrote before: it gets a sentinel.
    """

    def __init__(self, worker: Any) -> None:
        target, draft = worker.target_worker.model_runner, worker.model_runner
        self._tensors = {"req_to_token": target.req_to_token_pool.req_to_token}
        for owner, runner in (("target", target), ("draft", draft)):
            pool = runner.token_to_kv_pool
            # Of a recurrent target, or one with sliding layers.
            parts = [getattr(pool, part) for part in ("full_kv_pool", "swa_kv_pool") if hasattr(pool, part)]
            for part, kind in itertools.product(parts or [pool], ("k_buffer", "v_buffer")):
                for layer, buffer in enumerate(getattr(part, kind)):
                    buffer[: pool.page_size] = SENTINEL
                    self._tensors[f"{owner} {kind} of layer {layer}, {type(part).__name__} {id(part)}"] = buffer
        self._before = {name: tensor.clone() for name, tensor in self._tensors.items()}
        self._attention = draft.attn_backend
        self._plan = dict(vars(draft.attn_backend))

    def changed(self) -> list[str]:
        bits = torch.int32  # a NaN is equal to itself
        written = [
            name
            for name, tensor in self._tensors.items()
            if not tensor.view(bits).equal(self._before[name].view(bits))
        ]
        plan = vars(self._attention)
        return written + [f"draft attention: {name}" for name in plan if plan[name] is not self._plan.get(name)]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
