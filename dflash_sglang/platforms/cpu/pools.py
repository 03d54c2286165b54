"""The CPU platform's KV pool, and its copies between KV pools and the host's for `--enable-hierarchical-cache`.

They are torch forms of SGLang's `direct` I/O with its `page_first_direct` layout. `CpuPlatform` chooses both. The
device of these servers is the CPU: a hit from the host is a copy within its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """SGLang's pool, without the Triton kernel that moves slots, and what warms it up."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """tgt_loc, src_loc [n]: slots. All are read before any is written."""
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]


def copy_on_the_host(*_: Any, **__: Any) -> None:
    """Puts the copies in place before the first host pool is built; without one nothing is imported."""
    from sglang.srt.mem_cache.pool_host import common, mamba, mha

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    for module in (mha, mamba):
        module.transfer_kv_all_layer_direct_lf_pf = copy_all_layers_to_host
        module.transfer_kv_per_layer_direct_pf_lf = copy_layer_from_host


def allocate(dims: Sequence[int], dtype: torch.dtype, device: str, allocator: Any, **_: Any) -> Tensor:
    """A host pool of shape `dims`, from SGLang's allocator; no driver is there to pin it."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def copy_all_layers_to_host(
    src_ptrs: Sequence[Tensor],  # per layer [slots, ...]; first all layers' keys, then all layers' values
    dst_ptrs: Sequence[Tensor],  # [pages, layers, page_size, ...] each: keys, values
    src_indices: Tensor,  # [tokens] slots
    dst_indices: Tensor,  # [tokens] places on the host
    page_size: int,
) -> None:
    """Writes the tokens' rows of every layer to the host's pools."""
    pages, offsets = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, rows in enumerate(src_ptrs):
        dst_ptrs[number // layers][pages, number % layers, offsets] = rows[src_indices]


def copy_layer_from_host(
    src_ptrs: Sequence[Tensor],  # [pages, layers, page_size, ...] each: keys, values
    dst_ptrs: Sequence[Tensor],  # [slots, ...] each, of the layer
    src_indices: Tensor,  # [tokens] places on the host
    dst_indices: Tensor,  # [tokens] slots
    layer_id: int,
    page_size: int,
) -> None:
    """Writes the tokens' rows of one layer to its slots."""
    pages, offsets = src_indices // page_size, src_indices % page_size
    for host, rows in zip(src_ptrs, dst_ptrs, strict=True):
        rows[dst_indices] = host[pages, layer_id, offsets]
