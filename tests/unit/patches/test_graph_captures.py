"""How often a forward runs before SGLang's own code captures it; the device is a stand-in."""

from __future__ import annotations

import inspect
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner_backend import full_cuda_graph_backend
from sglang.srt.runtime_context import get_flags

from dflash_sglang.patches.graph_captures import capture_one


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`captures`: whether a graph is being captured."""
    device = SimpleNamespace(captures=False, synchronize=lambda: None)

    @contextmanager
    def graph(**_: Any) -> Any:
        device.captures = True
        yield
        device.captures = False

    device.graph = graph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(full_cuda_graph_backend, "get_parallel", lambda: SimpleNamespace(tp_group=Group))
    monkeypatch.setattr(full_cuda_graph_backend, "graph_pool_capture_scope", nullcontext)
    return device


class Group:
    @staticmethod
    def barrier() -> None:
        pass


@pytest.mark.parametrize("compiled, before", [(False, [2, 1, 1]), (True, [2, 2, 2])])
def test_a_backends_first_forward_runs_twice_before_its_capture_and_others_once(
    monkeypatch: pytest.MonkeyPatch, device: SimpleNamespace, compiled: bool, before: list[int]
) -> None:
    monkeypatch.setattr(get_flags().capture, "enable_torch_compile", compiled)
    backend = full_cuda_graph_backend.FullCudaGraphBackend(SimpleNamespace(device_module=device))
    # Another test may have hooked it. SGLang gives the hooked one to every module that has a name for it.
    whole = inspect.unwrap(full_cuda_graph_backend.FullCudaGraphBackend.capture_one)
    resets: list[int] = []
    for key, runs in enumerate(before):
        ran: list[bool] = []

        def forward(ran: list[bool] = ran) -> int:
            ran.append(device.captures)
            return len(ran)

        capture_one(whole, backend, key, forward, None, post_warmup_hook=lambda: resets.append(1))
        assert ran == [False] * runs + [True]
        assert backend._outputs[key] == runs + 1, "of the captured run"
    assert len(resets) == 6, "what a warm-up changed is reset, as without the hook"
