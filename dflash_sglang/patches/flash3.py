"""FlashAttention 3 over trees, and over blocks without launches that SGLang's backend need not make in each layer.

Schedules: for blocks, each layer launches a kernel that finds the same tile schedule again. Here a captured
forward makes it once, as SGLang's backend does for decode, with one query per request.
Metadata: a captured forward of blocks begins with its page table, so that its replay needs nothing before it.
Queries: the backend first copies the queries of each layer, a slice of the projection's rows. Here the kernel
reads them where they lie.
What both save of a step: `docs/reference/optimisations.md`.
Trees: the kernel attends to the prefixes, and `add_tree_keys` lets the nodes attend to each other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dflash_sglang.kernels.attention.tree_keys import Prefix, TreeKeys, add_tree_keys
from dflash_sglang.kernels.block.grow_tree import Tree
from dflash_sglang.patches.apply import replace

BACKENDS = "sglang.srt.layers.attention.flashattention_backend"  # imports CUDA kernels: there if one is in use
_WHOLE_CONTEXT = (-1, -1)


def shares_schedules(backend: Any) -> bool:
    """Whether a backend is of FlashAttention 3 and for layers with heads, where SGLang shares schedules itself."""
    module: Any = sys.modules.get(BACKENDS)
    if module is None or not isinstance(backend, module.FlashAttentionBackend):
        return False
    version_3 = backend._get_scheduler_metadata is not None
    return version_3 and not backend.use_mla and not backend._disable_scheduler_metadata_precompute


def spare_launches(backend: Any) -> bool:
    """Once for each attention backend of blocks, before its graphs are captured. Whether it `shares_schedules`."""
    backend = getattr(backend, "full_attn_backend", backend)  # of a target with recurrent layers too
    if not shares_schedules(backend):
        return False
    share_schedule(backend, sys.modules[BACKENDS])
    read_by_strides(backend)
    return True


def share_schedule(backend: Any, module: Any) -> None:
    """backend: SGLang's, of FlashAttention 3, from `module`."""
    if not isinstance(module.flash_attn_with_kvcache, SharedSchedules):
        schedules = SharedSchedules(module.flash_attn_with_kvcache, backend._get_scheduler_metadata)
        replace("flash3-schedules", module, schedules)
    schedules, prepare = module.flash_attn_with_kvcache, backend.init_forward_metadata_in_graph
    backend.prepares_in_graph = _knows_its_lengths(backend)

    def prepare_and_begin(forward_batch: Any) -> None:
        if backend.prepares_in_graph and forward_batch.forward_mode.is_target_verify():
            _find_pages(backend, forward_batch)
        prepare(forward_batch)
        schedules.begin(backend.forward_metadata.cache_seqlens_int32)

    replace("flash3-metadata", backend, prepare_and_begin)


def _find_pages(backend: Any, batch: Any) -> None:
    """Capturable: page table and lengths of a forward of blocks, as SGLang finds them before each replay."""
    metadata, layout = backend.forward_metadata, batch.spec_info.ragged_verify_layout
    lens, more = batch.seq_lens, backend.speculative_num_draft_tokens
    if layout is not None:
        metadata.cu_seqlens_q.copy_(layout.qo_indptr_device)
        lens, more = lens + layout.verify_lens, 0
    backend._set_decode_page_metadata(batch.kv_loc_plan, metadata, batch.req_pool_indices, lens, more)


def _knows_its_lengths(backend: Any) -> bool:
    """Whether what a forward of blocks reads follows from requests and lengths on the device, and no slots are
    renamed on the way."""
    renames = backend.use_sliding_window_kv_pool or backend.kv_index_translator.reads_are_translated
    return not (renames or backend.topk > 1 or backend.local_attn_builder is not None)


class SharedSchedules:
    """Takes the place of `flash_attn_with_kvcache`: its calls of one captured forward share their schedules.

    What is captured computes them anew in every replay, so they fit the lengths that the replay finds.
    """

    def __init__(self, attend: Callable[..., Any], schedule: Callable[..., Tensor]) -> None:
        """schedule: `sgl_kernel.flash_attn.get_scheduler_metadata`."""
        self._attend, self._schedule = attend, schedule
        self._lengths: Tensor | None = None
        self._made: dict[tuple[Any, ...], Tensor] = {}
        self._trees: tuple[Tensor, Tensor] | None = None

    def begin(self, lengths: Tensor) -> None:
        """A forward is being captured whose layers find the contexts' `lengths` [bs] in this very tensor."""
        self._lengths, self._made = lengths, {}

    @contextmanager
    def over_trees(self, ancestors: Tensor, slots: Tensor) -> Iterator[None]:
        """Calls meanwhile are of trees: their `cache_seqlens` are the prefixes.

        ancestors [bs or more, nodes]: of the nodes, as in `Tree`. slots [bs * nodes]: of their keys and values.
        """
        self._trees = ancestors, slots
        try:
            yield
        finally:
            self._trees = None

    def __call__(self, *args: Any, **call: Any) -> Any:
        if self._trees is None:
            return self._once(*args, **call)
        if call.get("sinks") is not None:
            raise NotImplementedError("a layer with sinks attends to a tree: expected none, see `why_no_trees`")
        out, lse, *_ = self._once(*args, **{**call, "causal": False, "return_softmax_lse": True})
        ancestors, slots = self._trees
        ancestors = ancestors[: len(call["cache_seqlens"])]
        keys, values = (call[pool].view(-1, *call[pool].shape[2:]) for pool in ("k_cache", "v_cache"))
        own = TreeKeys(keys, values, slots.view(ancestors.shape), ancestors)
        add_tree_keys(call["q"], Prefix(out, lse), own, call["softmax_scale"])
        return out

    def _once(self, *args: Any, **call: Any) -> Any:
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

    replace("flash3-forward", backend, forward_extend)


def serve_trees(backend: Any, tree: Tree) -> None:
    """backend: one that `spare_launches` has changed; its verify forwards are of trees from here on."""
    schedules: SharedSchedules = sys.modules[BACKENDS].flash_attn_with_kvcache
    fill, prepare = backend._set_decode_page_metadata, backend.init_forward_metadata
    forward = backend.forward_extend

    def fill_prefixes(plan: Any, metadata: Any, requests: Tensor, seq_lens: Tensor, seq_len_delta: int) -> None:
        del seq_len_delta
        fill(plan, metadata, requests, seq_lens, 0)

    def prepare_prefixes(forward_batch: Any) -> None:
        prepare(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            backend.forward_metadata.cache_seqlens_int32 = forward_batch.seq_lens.to(torch.int32)

    def forward_extend(
        q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            return forward(q, k, v, layer, forward_batch, *args, **kwargs)
        with schedules.over_trees(tree.ancestors, forward_batch.out_cache_loc):
            return forward(q, k, v, layer, forward_batch, *args, **kwargs)

    replace("flash3-prefixes", backend, fill_prefixes)
    replace("flash3-eager-prefixes", backend, prepare_prefixes)
    replace("flash3-forward", backend, forward_extend)
