"""Hooks for the places where SGLang reaches for a GPU, or for its own CPU engine, without asking the platform.

Each function below says what it stands in for and what happens without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dflash_sglang.platforms.cpu import threads
from dflash_sglang.platforms.cpu.ops import assign_req_to_token_pool, murmur_hash32, softcap_

SOURCE = HookSource(plugin_name="dflash_cpu", dist_name="dflash-sglang")
Hooks = Mapping[str, Callable[..., Any]]  # by their places in sglang.srt


def register_rank_hooks() -> None:
    """Registers the hooks on a rank's way to its process group and weights, in time for `load_plugins()`."""
    replaced: Hooks = {
        "distributed.bootstrap._bind_threads_if_cpu": threads.share_cores,
        "distributed.bootstrap._init_cpu_threads_env": leave_memory_unshared,
        "configs.update_config.adjust_config_with_unaligned_cpu_tp": keep_config,
    }
    _register(HookType.REPLACE, replaced)


def register_hooks() -> None:
    """Registers the other hooks; `load_plugins()` or `HookRegistry.apply_hooks()` puts them in place."""
    from sglang.srt.layers.dp_attention import memcpy_cpu

    from dflash_sglang.platforms.cpu.pools import copy_on_the_host

    replaced: Hooks = {  # Triton launches ("0 active drivers"), and operators that it would bring in
        "mem_cache.allocation.assign_req_to_token_pool_func": assign_req_to_token_pool,
        "layers.logits_processor.fused_softcap": softcap_,
        "layers.sampler.murmur_hash32": murmur_hash32,
        "layers.dp_attention.memcpy": memcpy_cpu,
        "layers.dp_attention.mask_dp_pad_moe_topk_ids": mask_dp_pad_moe_topk_ids,
        "model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode": keep_operators,
    }
    around: Hooks = {
        "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor": all_gather_over_gloo,
        "distributed.parallel_state.GroupCoordinator.reduce_scatter_tensor": reduce_scatter_over_gloo,
        "distributed.parallel_state.GroupCoordinator.all_to_all_single": all_to_all_over_gloo,
        "model_executor.model_runner.ModelRunner._extend_forward_kwargs": keep_dtype_of_input_embeds,
        "model_executor.model_runner.ModelRunner.init_lora_manager": unpinned,
        "lora.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch": unpinned,
    }
    before: Hooks = {
        "disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": send_page_indices_at_once,
        "mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache": copy_on_the_host,
    }
    _register(HookType.REPLACE, replaced)
    _register(HookType.AROUND, around)
    _register(HookType.BEFORE, before)


def _register(kind: HookType, hooks: Hooks) -> None:
    for name, hook in hooks.items():
        HookRegistry.register(f"sglang.srt.{name}", hook, kind, source=SOURCE)


def leave_memory_unshared(**_: Any) -> None:
    """Stands in for the set-up of shared memory by sgl-kernel's CPU build; ranks talk over gloo.

    Without it SGLang refuses more ranks than NUMA nodes, and on ARM calls the build whether it exists or not.
    """


def keep_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Stands in for padding a model's heads to the TP size, which the weight loader does not follow.

    Without it a model with fewer KV heads than ranks does not load.
    """
    return model_config


def all_gather_over_gloo(original: Callable[..., None], group: Any, output: Tensor, input: Tensor) -> None:
    """Stands in for the custom operator behind `all_gather_into_tensor`, which has no CPU kernel."""
    # Flat, because gloo takes no output of [ranks, *input.shape], which NCCL takes.
    torch.distributed.all_gather_into_tensor(output.view(-1), input.reshape(-1), group=group.device_group)


def reduce_scatter_over_gloo(original: Callable[..., None], group: Any, output: Tensor, input: Tensor) -> None:
    """Does the same for `reduce_scatter_tensor`, of the ranks' rows of data-parallel attention."""
    group._reduce_scatter_tensor(output, input)


def all_to_all_over_gloo(original: Callable[..., None], group: Any, output: Tensor, input: Tensor) -> None:
    """Does the same for `all_to_all_single`, by which a decode server's ranks get their rows of the logits."""
    group._all_to_all_single(output, input)


def mask_dp_pad_moe_topk_ids(topk_ids: Tensor) -> None:
    """Writes -1 to the rows of topk_ids [ranks * longest, k] that pad a rank's tokens to the longest rank's."""
    from sglang.srt.layers.dp_attention import _DpGatheredBufferWrapper as buffer

    counts, longest = buffer.get_dp_global_num_tokens_gpu(), buffer.get_local_dp_buffer_len()
    if counts is None or not 0 < len(topk_ids) == len(counts) * longest:
        return
    padding = topk_ids.new_tensor(range(longest)) >= counts[:, None]
    topk_ids[padding.view(-1)] = -1


def unpinned(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Makes the small tables of LoRA adapters ordinary memory: to pin it takes a GPU."""
    with _Unpinned():
        original(*args, **kwargs)


class _Unpinned(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


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


def let_torch_be_on_a_cpu() -> None:
    """Makes `Tensor.record_stream`, which refuses a `torch.cpu.Stream`, a no-op for CPU tensors, and
    `torch.get_device_module()` the CPU's: torch names the accelerator that it was built for, if any.

    Makes a batch's token counts ordinary memory, too: SGLang pins them, which takes a GPU, unless it runs its own
    CPU engine. It then asks the attention for `get_cpu_graph_seq_len_fill_value`."""
    from sglang.srt.model_executor import forward_batch_info

    record_stream, get_device_module = Tensor.record_stream, torch.get_device_module

    def record_stream_on_devices(self: Tensor, stream: Any) -> None:
        if self.device.type != "cpu":
            record_stream(self, stream)

    @functools.wraps(get_device_module)  # torch's compiler reads __wrapped__
    def module(device: Any = None) -> Any:
        return get_device_module("cpu" if device is None else device)

    Tensor.record_stream = record_stream_on_devices
    torch.get_device_module = module
    forward_batch_info._is_cpu = True
