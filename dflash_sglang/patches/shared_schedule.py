"""Make FlashAttention 3's tile schedule once in a captured forward, and use it in all layers.

SGLang's backend does so for decode, with one query per request. For blocks, each layer launches a kernel that
finds the same schedule again. On an H200 that costs 0.175 ms of a step of 5.95 ms with 1 request
(`docs/internals/optimisations.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from dflash_sglang.patches.apply import replace

_WHOLE_CONTEXT = (-1, -1)


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
