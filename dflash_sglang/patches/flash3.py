"""FlashAttention 3 over blocks, without the launches that SGLang's backend need not make in every layer."""

from __future__ import annotations

import sys
from typing import Any

from dflash_sglang.patches.shared_schedule import share_schedule
from dflash_sglang.patches.strided_queries import read_by_strides

BACKENDS = "sglang.srt.layers.attention.flashattention_backend"  # imports CUDA kernels: there if one is in use


def spare_launches(backend: Any) -> bool:
    """Once for each attention backend of blocks, before its graphs are captured. Whether it is one: of
    FlashAttention 3 and for layers with heads, where SGLang shares schedules itself."""
    backend = getattr(backend, "full_attn_backend", backend)  # of a target with recurrent layers too
    module: Any = sys.modules.get(BACKENDS)
    if module is None or not isinstance(backend, module.FlashAttentionBackend):
        return False
    version_3 = backend._get_scheduler_metadata is not None
    if not version_3 or backend.use_mla or backend._disable_scheduler_metadata_precompute:
        return False
    share_schedule(backend, module)
    read_by_strides(backend)
    return True
