"""FlashAttention 3 over blocks, without the launches that SGLang's backend need not make in every layer.

Schedules: for blocks, each layer launches a kernel that finds the same tile schedule again. Here a captured
forward makes it once, as SGLang's backend does for decode, with one query per request.
Queries: the backend first copies the queries of each layer, a slice of the projection's rows. Here the kernel
reads them where they lie.
What both save of a step: `docs/internals/optimisations.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dflash_sglang.patches.apply import replace

BACKENDS = "sglang.srt.layers.attention.flashattention_backend"  # imports CUDA kernels: there if one is in use
_WHOLE_CONTEXT = (-1, -1)


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


def share_schedule(backend: Any, module: Any) -> None:
    """backend: SGLang's, of FlashAttention 3, from `module`."""
    if not isinstance(module.flash_attn_with_kvcache, SharedSchedules):
        schedules = SharedSchedules(module.flash_attn_with_kvcache, backend._get_scheduler_metadata)
        replace("flash3-schedules", module, schedules)
    schedules, prepare = module.flash_attn_with_kvcache, backend.init_forward_metadata_in_graph

    def prepare_and_begin(forward_batch: Any) -> None:
        prepare(forward_batch)
        schedules.begin(backend.forward_metadata.cache_seqlens_int32)

    replace("flash3-metadata", backend, prepare_and_begin)


class SharedSchedules:
    """Takes the place of `flash_attn_with_kvcache`: its calls of one captured forward share their schedules.

    What is captured computes them anew in every replay, so they fit the lengths that the replay finds.
    """

    def __init__(self, attend: Callable[..., Any], schedule: Callable[..., Tensor]) -> None:
        """schedule: `sgl_kernel.flash_attn.get_scheduler_metadata`."""
        self._attend, self._schedule = attend, schedule
        self._lengths: Tensor | None = None
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def begin(self, lengths: Tensor) -> None:
        """A forward is being captured whose layers find the contexts' `lengths` [bs] in this very tensor."""
        self._lengths, self._made = lengths, {}

    def __call__(self, *args: Any, **call: Any) -> Any:
        if self._lengths is not None and call.get("cache_seqlens") is self._lengths:
            if call["window_size"] == _WHOLE_CONTEXT and call.get("scheduler_metadata") is None:
                call["scheduler_metadata"] = self._of(**call)
        return self._attend(*args, **call)

    def _of(
        self,
        *,
        q: Tensor,  # [rows, heads, head_dim]
        k_cache: Tensor,  # [pages, page_size, kv_heads, head_dim]
        v_cache: Tensor,
        page_table: Tensor,  # [bs, pages of the longest context]
        cache_seqlens: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        causal: bool,
        softcap: float,
        num_splits: int,
        **rest: Any,
    ) -> Tensor:
        del rest
        page_size, kv_heads, head_dim = k_cache.shape[1:]
        depends_on = (page_table.shape, max_seqlen_q, q.shape[1], q.dtype, kv_heads, head_dim, v_cache.shape[-1],
                      page_size, causal, softcap > 0, num_splits)  # fmt: skip
        if depends_on not in self._made:
            self._made[depends_on] = self._schedule(
                batch_size=len(cache_seqlens),
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=page_table.shape[1] * page_size,
                num_heads=q.shape[1],
                num_heads_k=kv_heads,
                headdim=head_dim,
                headdim_v=v_cache.shape[-1],
                cache_seqlens=cache_seqlens,
                qkv_dtype=q.dtype,
                cu_seqlens_q=cu_seqlens_q,
                page_size=page_size,
                causal=causal,
                has_softcap=softcap > 0,
                num_splits=num_splits,
            )
        return self._made[depends_on]


class StridedQueries(Tensor):
    """A slice of rows whose `contiguous` is itself; whatever else is done with it gives ordinary tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:
        del args, kwargs
        return self.as_subclass(Tensor)


def read_by_strides(backend: Any) -> None:
    """backend: one whose kernel takes queries [rows, heads, head_dim] with any stride between rows."""
    forward = backend.forward_extend

    def forward_extend(
        q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        if forward_batch.forward_mode.is_target_verify() and q.stride(-1) == 1:
            q = q.as_subclass(StridedQueries)
        return forward(q, k, v, layer, forward_batch, *args, **kwargs)

    replace("flash3-queries", backend, forward_extend)
