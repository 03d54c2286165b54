"""Hooks for the places where SGLang reaches for a GPU, or for its own CPU engine, without asking the platform.

Each function below says what it stands in for and what happens without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from dflash_sglang.platforms.cpu import adapters, dp, host_cache
from dflash_sglang.platforms.cpu.ops import assign_req_to_token_pool, murmur_hash32, softcap_

SOURCE = HookSource(plugin_name="dflash_cpu", dist_name="dflash-sglang")


def register_rank_hooks() -> None:
    """Registers the hooks on a rank's way to its process group and weights, in time for `load_plugins()`."""
    for target, hook in (
        ("sglang.srt.distributed.bootstrap._bind_threads_if_cpu", leave_threads_unbound),
        ("sglang.srt.distributed.bootstrap._init_cpu_threads_env", leave_threads_unbound),
        ("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", keep_config),
    ):
        HookRegistry.register(target, hook, HookType.REPLACE, source=SOURCE)


def register_hooks() -> None:
    """Registers the hooks; SGLang's `load_plugins()` or `HookRegistry.apply_hooks()` puts them in place."""
    for target, hook, kind in (
        # A Triton launch: "0 active drivers".
        (
            "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
            assign_req_to_token_pool,
            HookType.REPLACE,
        ),
        ("sglang.srt.layers.logits_processor.fused_softcap", softcap_, HookType.REPLACE),  # a Triton launch
        ("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32, HookType.REPLACE),  # a Triton launch
        (
            "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
            keep_operators,
            HookType.REPLACE,
        ),
        (
            "sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor",
            all_gather_over_gloo,
            HookType.AROUND,
        ),
        (
            "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
            keep_dtype_of_input_embeds,
            HookType.AROUND,
        ),
        (
            "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
            send_page_indices_at_once,
            HookType.BEFORE,
        ),
    ):
        HookRegistry.register(target, hook, kind, source=SOURCE)
    adapters.register(SOURCE)
    dp.register(SOURCE)
    host_cache.register(SOURCE)


def leave_threads_unbound(**_: Any) -> None:
    """Stands in for the set-up of threads and shared memory by sgl-kernel's CPU build; ranks talk over gloo.

    Without it SGLang refuses more ranks than NUMA nodes, and on ARM calls the build whether it exists or not.
    """


def keep_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Stands in for padding a model's heads to the TP size, which the weight loader does not follow.

    Without it a model with fewer KV heads than ranks does not load.
    """
    return model_config


def all_gather_over_gloo(
    original: Callable[..., None], group: Any, output: torch.Tensor, input: torch.Tensor
) -> None:
    """Stands in for the custom operator behind `all_gather_into_tensor`, which has no CPU kernel."""
    # Flat, because gloo takes no output of [ranks, *input.shape], which NCCL takes.
    torch.distributed.all_gather_into_tensor(output.view(-1), input.reshape(-1), group=group.device_group)


def keep_dtype_of_input_embeds(
    original: Callable[..., dict[str, Any]], runner: Any, forward_batch: Any, pp_proxy_tensors: Any
) -> dict[str, Any]:
    """Undoes the model runner's cast of `input_embeds` to bfloat16, which a float32 draft cannot multiply."""
    kwargs = original(runner, forward_batch, pp_proxy_tensors)
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds
    return kwargs


def keep_operators(*_: Any) -> None:
    """Stands in for Triton kernels whose results do not depend on the batch. With torch's operators only seeds are
    served of --enable-deterministic-inference: other requests of a batch may change the last bits of a logit."""


def send_page_indices_at_once(*_: Any, **__: Any) -> None:
    """Stands in for page indices that a prefill server copies to pinned memory, with a CUDA event behind them."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False


def ignore_record_stream_on_cpu() -> None:
    """Makes `Tensor.record_stream`, which refuses a `torch.cpu.Stream`, a no-op for CPU tensors."""
    record_stream = torch.Tensor.record_stream

    def record_stream_on_devices(self: torch.Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            record_stream(self, stream)

    torch.Tensor.record_stream = record_stream_on_devices


def name_the_cpu_by_default() -> None:
    """Makes `torch.get_device_module()` the CPU's: torch names the accelerator that it was built for, if any."""
    get_device_module = torch.get_device_module

    @functools.wraps(get_device_module)  # torch's compiler reads __wrapped__
    def module(device: Any = None) -> Any:
        return get_device_module("cpu" if device is None else device)

    torch.get_device_module = module
