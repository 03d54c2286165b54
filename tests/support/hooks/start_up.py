"""What start-up has done before the first request."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from dflash_sglang.attention.torch_cpu import TorchCpuAttention
from dflash_sglang.warmup.dummy_batches import Rehearsal
from tests.support.hooks.pools import kv_buffers, kv_pools, recurrent_states
from tests.support.scheduler_hooks import note, records
from tests.support.seam import around


def rehearsals() -> None:
    """What is rehearsed before the first request may change nothing but the padding page, and draws no random
    number of a later step; says so in `rehearsed`."""
    names = ("seconds", "prefill", "step")
    ran: dict[str, list[Any]] = {name: [] for name in names}
    before: list[torch.Tensor] = []

    def counting(name: str) -> Any:
        rehearse = getattr(Rehearsal, name)

        def counted(self: Any, *arguments: Any, **more: Any) -> Any:
            ran[name].append([*arguments[:3], *more.values()])
            return rehearse(self, *arguments, **more)

        return counted

    def prefilled(rehearsed_prefill: Any, self: Any, batch: Any) -> None:
        """Lengths of the states that a prefix cache would keep, where there is one of states."""
        if batch.mamba_track_seqlens_cpu is not None:
            ran["prefill"][-1].append(batch.mamba_track_seqlens_cpu)
        rehearsed_prefill(self, batch)

    def state(self: Any) -> list[torch.Tensor]:
        page, requests = self._reservation.page_size, self.target_worker.model_runner.req_to_token_pool
        tensors = [requests.req_to_token, self._tables.adjustments.penalties._counts]
        tensors += [buffer[page:] for pool in kv_pools(self) for buffer in kv_buffers(pool)]
        tensors += [rows[:, 1:] for rows in recurrent_states(self)]
        return tensors

    def watched(init_cuda_graphs: Any, self: Any) -> None:
        before.extend(tensor.clone() for tensor in state(self))
        init_cuda_graphs(self)

    def compared(prewarm_sampling: Any, self: Any) -> Any:
        random_state = torch.get_rng_state()
        policy = self._widths._policy

        def policy_now() -> str:
            times = policy.decider and policy.decider.step_times
            return json.dumps([policy.metrics.snapshot(), times and [times._base.tolist(), times._variance]])

        told = policy_now()
        width = self.width
        result = prewarm_sampling(self)
        for number, (tensor, old) in enumerate(zip(state(self), before, strict=True)):
            assert torch.equal(tensor, old), f"tensor {number} of {len(before)} has changed"
        assert torch.equal(torch.get_rng_state(), random_state), "random numbers were drawn"
        assert self._slots.current[0] == 4, "the next outcome of nobody is somebody's"
        assert told == policy_now()
        assert self.width == width and not self._widths._launched
        ran["prefill"] = [[tokens, dict(sampling), *more] for tokens, sampling, *more in ran["prefill"]]
        ran["step"] = [[context, dict(sampling), shape.width] for context, sampling, shape in ran["step"]]
        (records() / "rehearsed").write_text(json.dumps([ran, json.loads(told)[1]]))
        return result

    around("rehearsed prefill", prefilled)
    for name in names:
        setattr(Rehearsal, name, counting(name))
    around("graphs", watched)
    around("warm-up", compared)


def firsts() -> None:
    """What forwards of requests import of this package, and which buffers they make, goes to firsts.jsonl.

    (when, which) kernels Triton compiles or loads, at start-up or for a request, go to kernels.jsonl; buffers that
    this package has when SGLang has sized the KV pools, to taken.json.
    """
    there: list[set[Any]] = []
    storages: set[tuple[int, int]] = set()  # of all tensors at the end of the start-up, graphs' inputs among them

    def now(self: Any) -> list[set[Any]]:
        modules = {name for name in sys.modules if name.startswith("dflash_sglang")}
        found = ((where, _storage(tensor)) for where, tensor in _own_tensors(self))
        return [modules, {(where, storage[1]) for where, storage in found if storage not in storages}]

    def loaded(*args: Any) -> None:
        note("kernels.jsonl", ["request" if there else "start-up", str(args[2])])

    def sized(alloc_memory_pool: Any, self: Any, **pools: Any) -> None:
        taken = [(where, _storage(tensor)[1]) for where, tensor in _own_tensors(self)]
        (records() / "taken.json").write_text(json.dumps(taken))
        alloc_memory_pool(self, **pools)

    def prewarmed(prewarm_sampling: Any, self: Any) -> Any:
        result = prewarm_sampling(self)
        there[:] = now(self)
        storages.update(_storage(thing) for thing in gc.get_objects() if isinstance(thing, torch.Tensor))
        return result

    def watched(forward: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode.name
        result = forward(self, batch, *args, **kwargs)
        modules, buffers = (list(after - before) for after, before in zip(now(self), there, strict=True))
        note("firsts.jsonl", [mode, modules, buffers])
        return result

    if torch.cuda.is_available():
        from triton import knobs

        knobs.runtime.kernel_load_start_hook.add(loaded)
    around("warm-up", prewarmed)
    around("batch", watched)
    around("pools", sized)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes, which a view shares with the tensor that it looks at."""
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def _own_tensors(owner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(where, tensor) of the tensors that this package's objects hold, at any depth."""
    seen, found = set(), [("worker", owner)]
    while found:
        where, thing = found.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield where, thing
        elif isinstance(thing, TorchCpuAttention):  # whose metadata are of a forward
            continue
        elif isinstance(thing, list | tuple):
            found += [(f"{where}[{i}]", item) for i, item in enumerate(thing)]
        elif type(thing).__module__.startswith("dflash_sglang") and hasattr(thing, "__dict__"):
            found += [(f"{where}.{name}", value) for name, value in vars(thing).items()]
