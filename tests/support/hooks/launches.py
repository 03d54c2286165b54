"""Launches that the CPU platform does not have by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dflash_sglang.attention import torch_cpu
from dflash_sglang.sglang_names.scheduler import SamplingBatchInfo


def causal() -> None:
    """The CPU platform's attention takes every layer for causal."""
    torch_cpu.NON_CAUSAL = ()


def host_lengths() -> None:
    """Attention takes its lengths from the host, as FlashInfer's does.

    SGLang voids what it has gathered from the relay, too: `scheduler_hooks.activate` sees to it.
    """
    torch_cpu.TorchCpuAttention.needs_cpu_seq_lens = True


def dram() -> None:
    """nixl moves the pools of a CPU. SGLang tells it that they are a GPU's."""
    from nixl._api import nixl_agent

    def of_the_host(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **more: method(
            *("DRAM" if isinstance(a, str) and a == "VRAM" else a for a in args), **more
        )

    for name in ("register_memory", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, of_the_host(getattr(nixl_agent, name)))


def seeds() -> None:
    """Requests sample with their seeds, as under --enable-deterministic-inference, which refuses min_p and chooses
    no widths."""
    build = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = build(cls, batch, vocab_size)
        info.sampling_seed = torch.tensor([req.sampling_params.sampling_seed or 42 for req in batch.reqs])
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)
