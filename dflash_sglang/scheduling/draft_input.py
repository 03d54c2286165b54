"""The draft state that travels with a running batch, and the KV slots reserved for its next blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash_sglang.compat import DFlashDraftInputV2, alloc_for_spec_decode, is_pin_memory_available

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

_RING = 4  # batches whose pinned lengths may still be in flight; overlap scheduling keeps at most two


class SlotReservation:
    """Reserves the slots of the next blocks of every request of a batch.

    Overlap scheduling launches a step before the accept of the previous one is known on the host, so a
    request may be one block further than its committed length says: two blocks past it are reserved.
    A reservation never exceeds `row_limit`, the last whole page of a request's row of `req_to_token`.
    """

    def __init__(self, max_requests: int, block_size: int, row_width: int, page_size: int, device: str):
        self.block_size = block_size
        self.page_size = page_size
        self.row_limit = row_width // page_size * page_size
        pinned = is_pin_memory_available(device)
        self._host = [torch.empty(2 * max_requests, dtype=torch.int32, pin_memory=pinned) for _ in range(_RING)]
        self._device = torch.empty(2 * max_requests, dtype=torch.int32, device=device)
        self._turn = 0

    def lengths(self, reqs: list[Req]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(committed, allocated, reserved) tokens of each request, int32 [bs]."""
        bs = len(reqs)
        committed = np.fromiter((req.kv.kv_committed_len for req in reqs), np.int32, bs)
        allocated = np.fromiter((req.kv.kv_allocated_len for req in reqs), np.int32, bs)
        wanted = committed + 2 * self.block_size
        pages = -(-wanted // self.page_size)
        reserved = np.maximum(allocated, np.minimum(pages * self.page_size, self.row_limit))
        return committed, allocated, reserved

    def reserve(self, batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate slots into `req_to_token`. Returns (committed, reserved) lengths, int [bs] on the host."""
        bs = len(batch.reqs)
        committed, allocated, reserved = self.lengths(batch.reqs)
        self._turn = (self._turn + 1) % _RING
        host = self._host[self._turn][: 2 * bs]
        host_np = host.numpy()
        host_np[:bs], host_np[bs:] = allocated, reserved
        device = self._device[: 2 * bs]
        device.copy_(host, non_blocking=True)
        alloc_for_spec_decode(
            batch.tree_cache,
            batch.req_to_token_pool,
            reqs=batch.reqs,
            req_pool_indices=batch.req_pool_indices,
            cur_kv_lens=device[:bs],
            cur_kv_lens_cpu=host[:bs],
            nxt_kv_lens=device[bs:],
            nxt_kv_lens_cpu=host[bs:],
            num_needed_tokens=int((reserved - allocated).sum()),
            batch=batch,
        )
        return torch.from_numpy(committed.astype(np.int64)), torch.from_numpy(reserved)


@dataclass
class DFlashDraftInput(DFlashDraftInputV2):
    """SGLang's DFLASH draft input with our slot reservation.

    The scheduler filters and merges it with the batch and calls `prepare_for_decode` before each step.
    """

    reservation: SlotReservation | None = None

    @classmethod
    def create(
        cls, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor, reservation: SlotReservation
    ) -> DFlashDraftInput:
        """`bonus_tokens` [bs]: last committed token; `new_seq_lens` [bs]: committed tokens with KV."""
        bs, device = new_seq_lens.shape[0], new_seq_lens.device
        unused = torch.empty((bs, 0), device=device)
        return cls(
            topk_p=unused,
            topk_index=unused,
            hidden_states=unused,
            bonus_tokens=bonus_tokens.long(),
            new_seq_lens=new_seq_lens.long(),
            reservation=reservation,
        )

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve the slots of the step that comes. Called by the scheduler, on its own stream."""
        if batch.batch_size() == 0:
            return
        assert self.reservation is not None
        batch.maybe_evict_swa()
        if batch.sampling_info.sampling_mask_batch_indices is not None:
            self.max_top_k = max(req.sampling_params.top_k for req in batch.reqs)
        committed, reserved = self.reservation.reserve(batch)
        for req in batch.reqs:
            req.decode_batch_idx += 1
        batch.seq_lens_cpu = committed
        batch.seq_lens_sum = int(committed.sum())
        self.nxt_kv_lens_cpu = reserved
        self.nxt_kv_lens_sum = int(reserved.sum())
