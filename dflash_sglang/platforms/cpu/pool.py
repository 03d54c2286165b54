"""The CPU platform's KV pool: SGLang's, without the Triton kernel that moves slots."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """KV pool of torch tensors. DFLASH verifies a chain and never moves slots: nothing to warm up."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
