"""The draft state that travels with a running batch, and the KV slots reserved for its next blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dflash_sglang.sglang_names.scheduler import (
    DFlashDraftInputV2,
    ScheduleBatch,
    alloc_for_spec_decode,
    get_schedule,
    is_pin_memory_available,
)

_ALIGNED = 4  # lengths in 16 bytes: Triton compiles a kernel anew for pointers between them
STRIDE = 128  # tokens more that a request gets slots for at once, where
AMPLE = 8  # times what they take are free or only cached
_RING = 4  # batches whose pinned lengths may still be in flight; overlap scheduling keeps at most two


class Reserved(NamedTuple):
    """What a reservation found and left, on the host."""

    committed: torch.Tensor  # [bs] int64, tokens with KV
    committed_sum: int
    lengths: torch.Tensor  # [bs] int32, tokens with slots; stands until the ring comes round
    lengths_sum: int
    chain: int  # rows of the longest chain that the step may verify, 0: no longer one than a block
    no_trees: str | None  # why the step may verify no tree: "context_end", "pool_full"; None if it may


class SlotReservation:
    """Reserves the slots of the next blocks of every request of a batch.

    Overlap scheduling launches a step before the accept of the previous one is known on the host, so a
    request may be one block further than its committed length says: two blocks past it are reserved. A reservation
    never exceeds `row_limit`, the last whole page of a request's row of `req_to_token`.

    SGLang sees to free slots for that, and to no more. So the widest tree that the batch can have is reserved
    where rows and pool have room for it, and likewise a chain that is longer than a block: with a block more, so
    that the step after it finds its slots. In an ample pool slots are taken in strides: most steps take none.
    """

    def __init__(self, max_requests: int, block_size: int, row_width: int, page_size: int, device: str):
        self.block_size = block_size
        self.page_size = page_size
        self.row_limit = row_width // page_size * page_size
        self._trees: Mapping[int, int] = {}
        self._chains: Mapping[int, int] = {}
        self._longest = cache(self._longest_of)
        self._in_flight = block_size  # tokens that the latest step may commit of a request
        # One buffer: what writes it and what reads it follow each other on the scheduler's stream.
        on_device = torch.empty(2 * _aligned(max_requests), dtype=torch.int32, device=device)
        self._ring = [_Lengths(on_device, is_pin_memory_available(device)) for _ in range(_RING)]
        self._turn = 0

    def serve_trees(self, trees: Mapping[int, int]) -> None:
        """trees: {nodes: the most requests of a step}."""
        self._trees = trees
        self._longest.cache_clear()

    def serve_chains(self, chains: Mapping[int, int]) -> None:
        """chains: {rows: the most requests of a step}, more rows than a block."""
        self._chains = chains
        self._longest.cache_clear()

    def _longest_of(self, requests: int) -> tuple[int, int]:
        """Rows of the longest chain, and nodes of the widest tree, of a step of so many requests; 0: none."""
        chain, nodes = (
            max((rows for rows, most in of.items() if requests <= most), default=0)
            for of in (self._chains, self._trees)
        )
        return chain, nodes

    def reserve(self, batch: ScheduleBatch) -> Reserved:
        """Allocate slots into `req_to_token`."""
        kvs = [req.kv for req in batch.reqs]
        committed, allocated = [kv.kv_committed_len for kv in kvs], [kv.kv_allocated_len for kv in kvs]
        self._turn = (self._turn + 1) % _RING
        lengths = self._ring[self._turn].views(len(kvs))
        lengths.allocated[:] = allocated
        committed_array = np.array(committed, dtype=np.int64)
        chain, no_trees = self._bound(batch, committed_array, lengths)
        reserved_sum = int(np.add.reduce(lengths.reserved))
        needed = reserved_sum - sum(allocated)
        if needed:
            lengths.device.copy_(lengths.host, non_blocking=True)
            alloc_for_spec_decode(
                batch.tree_cache,
                batch.req_to_token_pool,
                reqs=batch.reqs,
                req_pool_indices=batch.req_pool_indices,
                cur_kv_lens=lengths.device_allocated,
                cur_kv_lens_cpu=lengths.host_allocated,
                nxt_kv_lens=lengths.device_reserved,
                nxt_kv_lens_cpu=lengths.host_reserved,
                num_needed_tokens=needed,
                batch=batch,
            )
        committed_lens = torch.from_numpy(committed_array)
        return Reserved(committed_lens, sum(committed), lengths.host_reserved, reserved_sum, chain, no_trees)

    def _bound(self, batch: ScheduleBatch, committed: np.ndarray, lengths: LengthViews) -> tuple[int, str | None]:
        """`lengths.reserved`: two blocks past committed [bs] or more, in whole pages, within the row; never fewer
        than are allocated. Returns the rows of the longest chain that was reserved, and why no tree was."""
        chain, nodes = self._longest(len(committed))
        ahead, no_trees = committed + self._in_flight, None
        # No more, whatever was in flight: a chain has left slots for the block behind it.
        wanted = self._whole_pages(committed + 2 * self.block_size)
        if chain:
            more = self._whole_pages(ahead + chain + self.block_size)
            if self._obstacle(batch, more, lengths.allocated) is None:
                wanted = more
            else:
                chain = 0
        if nodes:
            more = np.maximum(self._whole_pages(ahead + nodes), wanted)
            no_trees = self._obstacle(batch, more, lengths.allocated)
            if no_trees is None:
                wanted = more
        self._in_flight = chain or self.block_size
        np.minimum(wanted, self.row_limit, out=wanted)
        if (wanted > lengths.allocated).any():
            more = np.minimum(self._whole_pages(wanted + STRIDE), self.row_limit)
            needed = int(np.maximum(more - lengths.allocated, 0).sum())
            # Cached tokens count: where a server has run for long they fill the pool.
            room = batch.token_to_kv_pool_allocator.available_size() + batch.tree_cache.evictable_size()
            if room >= AMPLE * needed and self._obstacle(batch, more, lengths.allocated) is None:
                wanted = more
        np.maximum(wanted, lengths.allocated, out=lengths.reserved)
        return chain, no_trees

    def _whole_pages(self, tokens: np.ndarray) -> np.ndarray:
        if self.page_size == 1:
            return tokens
        return (tokens + (self.page_size - 1)) // self.page_size * self.page_size

    def _obstacle(self, batch: ScheduleBatch, wanted: np.ndarray, allocated: np.ndarray) -> str | None:
        """Why rows or free slots have no room for so many tokens [bs]; None if they have. Evicts what is cached,
        as SGLang does.

        SGLang prepares a decode batch also to run it with a part of a prompt, and counts on free slots for the
        rest. So free slots are that prompt's while a request outside of the batch has a row.
        """
        if wanted.max() > self.row_limit:
            return "context_end"
        needed = int(np.maximum(wanted - allocated, 0).sum())
        if not needed:
            return None
        rows = batch.req_to_token_pool
        if get_schedule().enable_mixed_chunk and rows.size - rows.available_size() > len(batch.reqs):
            return "pool_full"
        room = batch.token_to_kv_pool_allocator.check_decode_capacity(
            num_tokens=needed,
            tree_cache=batch.tree_cache,
            requests=batch.reqs,
            spec_algorithm=batch.spec_algorithm,
        )
        return None if room else "pool_full"


class LengthViews(NamedTuple):
    """The first rows of the buffers below: of each request the allocated, then the reserved tokens, int32 [bs]."""

    allocated: np.ndarray
    reserved: np.ndarray
    host: torch.Tensor  # both, the reserved ones at an aligned place
    host_allocated: torch.Tensor
    host_reserved: torch.Tensor
    device: torch.Tensor
    device_allocated: torch.Tensor
    device_reserved: torch.Tensor


class _Lengths:
    """Pinned lengths of one batch in flight; the views of a batch size are kept until another one comes."""

    def __init__(self, device: torch.Tensor, pinned: bool) -> None:
        """device [2 * max_requests, aligned] int32: where they are copied to."""
        self._device = device
        self._host = torch.empty(device.shape, dtype=device.dtype, pin_memory=pinned)
        self._views = self._new_views(0)

    def views(self, bs: int) -> LengthViews:
        if bs != len(self._views.allocated):
            self._views = self._new_views(bs)
        return self._views

    def _new_views(self, bs: int) -> LengthViews:
        second = _aligned(bs)
        host, device = self._host[: second + bs], self._device[: second + bs]
        values = host.numpy()
        return LengthViews(
            values[:bs], values[second:], host, host[:bs], host[second:], device, device[:bs], device[second:]
        )


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


@dataclass
class DFlashDraftInput(DFlashDraftInputV2):
    """SGLang's DFLASH draft input with our slot reservation.

    The scheduler filters and merges it with the batch and calls `prepare_for_decode` before each step.
    """

    if TYPE_CHECKING:  # SGLang's fields
        bonus_tokens: torch.Tensor
        new_seq_lens: torch.Tensor
        future_indices: torch.Tensor | None
        nxt_kv_lens_cpu: torch.Tensor | None
        nxt_kv_lens_sum: int | None

    reservation: SlotReservation | None = None
    # As of the step that comes, as far as the host knows: an attention backend that takes lengths from the GPU has
    # none of them in the batch.
    committed_sum: int = 0
    chain: int = 0  # as `Reserved` has it, and the next
    no_trees: str | None = None

    @classmethod
    def create(
        cls, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor, reservation: SlotReservation
    ) -> DFlashDraftInput:
        """For SGLang's relay, from which the next step starts. `bonus_tokens` [bs]: last committed token;
        `new_seq_lens` [bs]: committed tokens with KV."""
        return cls(
            topk_p=None,
            topk_index=None,
            hidden_states=None,
            bonus_tokens=bonus_tokens.long(),
            new_seq_lens=new_seq_lens.long(),
            reservation=reservation,
        )

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve the slots of the step that comes. Called by the scheduler, on its own stream."""
        if not batch.reqs:
            return
        assert self.reservation is not None
        batch.maybe_evict_swa()
        reserved = self.reservation.reserve(batch)
        for req in batch.reqs:
            req.decode_batch_idx += 1
        self.committed_sum = reserved.committed_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = reserved.committed, reserved.committed_sum
        self.nxt_kv_lens_cpu, self.nxt_kv_lens_sum = reserved.lengths, reserved.lengths_sum
        self.chain, self.no_trees = reserved.chain, reserved.no_trees

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests of these rows [n]. SGLang's filters fields that DFLASH leaves empty as well."""
        self.nxt_kv_lens_cpu = self.nxt_kv_lens_sum = None  # of the batch as it was; the next step reserves anew
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]

    def merge_batch(self, spec_info: DFlashDraftInput) -> None:
        """Append another batch's requests."""
        self.nxt_kv_lens_cpu = self.nxt_kv_lens_sum = None
        if self.future_indices is not None:
            assert spec_info.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, spec_info.future_indices])
