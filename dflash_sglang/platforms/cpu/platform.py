"""The CPU platform: SGLang's own engine on a machine without an accelerator.

Selected with `SGLANG_PLATFORM=dflash_cpu`. It answers SGLang's platform questions (which attention backend,
which KV pool, whether DFLASH is supported) and, in the worker processes, replaces the launches of GPU kernels
that have no platform question of their own (`hooks.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.choices import (
    DRAFT_ATTENTION_BACKEND_CHOICES,
    add_deterministic_attention_backend_choices,
    add_draft_attention_backend_choices,
)
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from dflash_sglang.platforms.cpu import NAME, hooks

# SGLang turns CUDA graphs and Triton slot writers off by this name: the CPU attention is registered under it.
ATTENTION_BACKEND = "torch_native"
LORA_BACKEND = "torch_native"  # SGLang's torch operators
# Tokens of the KV pools by default. SGLang would size them by the machine's memory, and clear all of it.
TOKENS = 8192


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang platform for plain and DFLASH decoding with torch operators only."""

    # SGLang asks an out-of-tree platform for its answers; the in-tree CPU platform is one of x86 AMX kernels.
    _enum = PlatformEnum.OOT
    device_name = NAME
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        # The draft worker consults this list, not supports_speculative_draft_attention_backend().
        if ATTENTION_BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
            add_draft_attention_backend_choices([ATTENTION_BACKEND])
            add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
        # SGLang rounds the inputs that convolutions remember to bfloat16, whatever --dtype says.
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
        # A prefill server orders such a send after its forward by a CUDA event.
        os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
        hooks.register_rank_hooks()

    def get_device(self, device_id: int = 0) -> str:
        """The default of `--device`; the in-tree CPU mixin's `torch.device` is not what SGLang parses."""
        return "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Names attention backend and size of the KV pools where the user did not, how the host's are copied, how
        a decode server keeps retracted requests, and what multiplies adapters.

        SGLang's own backend for x86 needs AMX kernels, and its default copies are GPU kernels (`pools.py`),
        as are its adapters. Its default for retracted requests pins memory with the CUDA driver.
        """
        if server_args.attention_backend is None:
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = TOKENS
        if server_args.disaggregation_decode_retraction_backup is None:
            server_args.disaggregation_decode_retraction_backup = "cpu_tensor"
        server_args.hicache_io_backend = "direct"
        server_args.hicache_mem_layout = "page_first_direct"
        server_args.lora_backend = LORA_BACKEND

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def get_compile_backend(self, mode: str | None = None) -> str:
        """Nothing is compiled: inductor needs a C++ compiler, and tens of seconds of a sharded server's start."""
        return "eager"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm == "DFLASH" and backend == ATTENTION_BACKEND

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """Returns the KV pool class for `kind`; None keeps SGLang's."""
        if kind != "mha":
            return None
        from dflash_sglang.platforms.cpu.pools import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from dflash_sglang.platforms.cpu.ops import block_slots

        return block_slots

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Recurrent states are kept for the prefix cache: `recurrent.py` writes them."""
        return True

    def get_torch_profiler_activity_str(self) -> str:
        """Asked for by /start_profile, whatever it shall record."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Registers the attention backend and the hooks; SGLang calls it once in each worker process."""
        from dflash_sglang.attention.torch_cpu import register

        register(ATTENTION_BACKEND)
        hooks.register_hooks()
        hooks.let_torch_be_on_a_cpu()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Applies the hooks where `load_plugins()` has not; turns the built-in draft's Triton kernel off."""
        from dflash_sglang.platforms.cpu import recurrent

        config = getattr(model, "config", None)
        # SGLang gives the property to configs with recurrent layers.
        if config is not None and hasattr(config.get_text_config(), "mamba2_cache_params"):
            recurrent.register(hooks.SOURCE)
        hooks.HookRegistry.apply_hooks()
        module: Any
        for module in model.modules():
            if getattr(module, "use_table_qk_norm_rope", False):
                module.use_table_qk_norm_rope = False
