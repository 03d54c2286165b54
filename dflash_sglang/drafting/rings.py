"""The draft's keys and values in rings: one for each running request, and the tails of finished ones."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.window import DraftWindow
from dflash_sglang.kernels.context.rings import SLOT, Moves, RingShape, RingTables, assign_slots, take_over
from dflash_sglang.models.context_kv.projection import ContextKV
from dflash_sglang.sglang_names.scheduler import KVLocPlan, ScheduleBatch, async_h2d, is_pin_memory_available


class DraftRings(DraftWindow):
    """Which ring a request has, and which of its tokens are there.

    A request gets the ring that has been idle longest when its first tokens are prefilled. What another ring still
    has of its prefix is copied. The ring becomes idle when SGLang gives the request's row to another one: until it
    is taken, later requests find its tokens there. All ranks that share a batch choose alike.

    A request may lack draft rows of a prefix that no ring has any longer. Its blocks then see fewer tokens, and
    accept fewer; the output is the target's.
    """

    def __init__(
        self,
        shape: RingShape,
        rings: int,
        block_size: int,
        target_slots: int,
        pool: Any,
        table: Tensor,
        own: Tensor,
    ) -> None:
        """target_slots: of the target's pool, with its padding page. pool: the draft's, of `rings` rings. table,
        own [rows, row_width] int32: req_to_token of the target and of the draft."""
        rows, device = table.shape[0], table.device
        if rings < rows:
            raise ValueError(f"rings={rings}: expected at least {rows}, the rows of req_to_token.")
        self.shape, self._pool, self._table = shape, pool, table

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        first = (torch.arange(rows, device=device) - 1).clamp(min=0)  # row 0 is padding
        tags = zeros(rings, shape.size) - 1
        self._tables = RingTables(shape, first, zeros(rows), tags, zeros(target_slots), zeros(rings))
        super().__init__(shape.span, self._tables.slots, own)
        self._ring_of_row = first.tolist()
        self._idle = deque(range(rows - 1, rings))
        self._owners: list[Any] = [None] * rows
        self._slots = zeros(rows * block_size)
        self._moves = Moves(zeros(shape.context), zeros(shape.context))
        self._step = 0
        pinned = is_pin_memory_available(device.type)
        self._low_on_host = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)  # of the tables, on the host
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def rings(self) -> int:
        return len(self._tables.tags)

    # ---- Where tokens are written ------------------------------------------------------------------------

    def assign(self, rows: Tensor, firsts: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Draft slots [n, tokens] int64 of tokens that this step writes: those of row i follow each other from
        position firsts[i] on. slots [n, tokens]: as req_to_token names them, 0 for tokens of nobody."""
        if out is None:
            out = torch.empty_like(slots)
        self._step += 1
        assign_slots(rows, firsts, slots, self._step, self._tables, out)
        return out

    def assign_block(self, rows: Tensor, firsts: Tensor, slots: Tensor) -> Tensor:
        """The same of a step's blocks, in a buffer that keeps its place."""
        return self.assign(rows, firsts, slots, self._slots[: slots.numel()].view(slots.shape))

    def named(self, slots: Tensor) -> Tensor:
        """The draft slots of tokens that were assigned some in this step, by their target slots. Capturable in a
        CUDA graph; padding (0) is 0."""
        return self._tables.latest[slots] & SLOT

    # ---- What blocks read --------------------------------------------------------------------------------

    def _low(self, block: Block) -> np.ndarray:
        """Waits for the latest prefill to have begun."""
        assert block.requests_cpu is not None
        if self._copied is not None:
            self._copied.synchronize()
        return self._low_on_host.numpy()[block.requests_cpu.numpy()]

    # ---- Prefills ----------------------------------------------------------------------------------------

    def admit(self, batch: ScheduleBatch) -> None:
        """Give rings to the requests of a prefill that have none, and copy what other rings have of their
        prefixes."""
        new = []
        for request, row, hit in zip(
            batch.reqs, batch.req_pool_indices_cpu.tolist(), batch.prefix_lens, strict=True
        ):
            owner = weakref.ref(request)
            if self._owners[row] == owner:
                continue  # a later chunk, or decoding beside a prefill
            self._idle.append(self._ring_of_row[row])
            self._ring_of_row[row], self._owners[row] = self._idle.popleft(), owner
            new.append((row, self._ring_of_row[row], hit))
        if not new:
            return
        tables = self._tables
        rows, rings, hits = async_h2d(new, dtype=torch.int64, device=self._table.device).unbind(1)
        tables.ring_of_row[rows], tables.low[rows] = rings, hits
        for row, _, hit in new:
            if hit:
                self._take_over(row, hit)
        self._low_on_host.copy_(tables.low, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def rehearse(self) -> None:
        """Compile what prefix hits launch. Changes nothing: no ring has a token of row 0."""
        self._take_over(0, 1)
        self._tables.low[0] = 0

    def _take_over(self, row: int, hit: int) -> None:
        take_over(row, hit, self._table, self._tables, self._moves)
        self._pool.move_kv_cache(*self._moves)

    def assign_prefill(
        self, batch: ScheduleBatch, positions: Tensor, slots: Tensor
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """(which of a prefill's tokens are kept, their positions, their draft slots); None: all of them.

        positions, slots [T]: of all tokens. A ring keeps the last ones of a chunk."""
        lens, device = batch.extend_lens, slots.device
        counts = async_h2d(lens, dtype=torch.int64, device=device)
        rows = torch.repeat_interleave(batch.req_pool_indices.long(), counts, output_size=len(slots))
        kept = None
        if max(lens) > self.shape.size:
            self._tables.latest[slots] = 0  # of those that are left out: no ring has them
            last, number = counts.clamp(max=self.shape.size), sum(min(n, self.shape.size) for n in lens)
            left_out = (counts - last).cumsum(0)  # before the last ones of each request
            kept = torch.repeat_interleave(left_out, last, output_size=number)
            kept += torch.arange(number, device=device)
            positions, slots, rows = positions[kept], slots[kept], rows[kept]
        return kept, positions, self.assign(rows, positions, slots[:, None].contiguous()).view(-1)


class RingContext:
    """The draft's `ContextWriter` into rings."""

    def __init__(self, context: ContextKV, rings: DraftRings) -> None:
        """context: writes to the slots of the draft's pool."""
        self._context, self._rings = context, rings

    def write(self, features: Tensor, positions: Tensor, slots: Tensor, requests: Tensor) -> None:
        """As `ContextWriter.write`, of tokens that were assigned slots in this step."""
        self._context.write(features, positions, self._rings.named(slots), requests)

    def write_planned(self, features: Tensor, positions: Tensor, plan: KVLocPlan) -> None:
        self.write(features, positions, self._context.slots_of(plan), plan.req_pool_indices)

    def write_prefill(
        self, features: Tensor, positions: Tensor, plan: KVLocPlan, batch: ScheduleBatch, last_tokens: Tensor
    ) -> None:
        """The last tokens of each request: what its ring keeps."""
        self._rings.admit(batch)
        kept, positions, slots = self._rings.assign_prefill(batch, positions, self._context.slots_of(plan))
        self._context.write(features if kept is None else features[kept], positions, slots)
