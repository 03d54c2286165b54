"""Which slots of the KV pools a step reads and writes."""

from __future__ import annotations

from typing import Any

import torch

from dflash_sglang.drafting.block import longest_prefix
from tests.support.hooks.pools import kv_buffers, kv_pools, recurrent_states, table_of
from tests.support.seam import around


def poison() -> None:
    """After each decode step, K and V of the rows that were not committed become NaN in both pools."""

    def then_poison(decode: Any, self: Any, batch: Any, *args: Any) -> Any:
        requests = batch.req_pool_indices.clone()
        seq_lens = self._slots.relay.new_seq_lens[requests]
        reach, result = _reach(self, batch), decode(self, batch, *args)
        table = table_of(self)
        for request, old, new in zip(
            requests.tolist(), seq_lens.tolist(), result.new_seq_lens.tolist(), strict=True
        ):
            rejected = table[request, new : old + reach].long()
            for pool in kv_pools(self):
                for buffer in kv_buffers(pool):
                    buffer[rejected] = float("nan")
        return result

    around("decode", then_poison)


def blindfold() -> None:
    """Before each draft forward, K and V of the context that an imposed window leaves out become NaN; in the
    batch's rings, all that its blocks do not read."""
    pools: list[Any] = []

    def before_step(step: Any, self: Any, *args: Any) -> Any:
        pools[:] = [self.model_runner.token_to_kv_pool]
        return step(self, *args)

    def then_poison(cut: Any, self: Any, block: Any) -> Any:
        """NaN in the draft's pool at every context position that the window leaves out."""
        seen = cut(self, block)
        assert not block.exact or seen.kv_len_bounds.tolist() == (seen.prefix_lens + block.size).tolist()
        for request, prefix in zip(block.requests.tolist(), block.prefix_lens.tolist(), strict=True):
            first = max(prefix - self.span.window, 0) // self.span.page_size * self.span.page_size
            outside = self._source[request, self.span.sinks : max(first, self.span.sinks)].long()
            for buffer in kv_buffers(pools[0]):
                buffer[outside] = float("nan")
        return seen

    def then_poison_rings(cut: Any, self: Any, block: Any) -> Any:
        """NaN in the rings of the batch at every slot that its blocks do not read."""
        seen = cut(self, block)
        assert not block.exact or seen.kv_len_bounds.tolist() == (seen.prefix_lens + block.size).tolist()
        for request, length in zip(block.requests.tolist(), seen.prefix_lens.tolist(), strict=True):
            first = self.shape.page_size + int(self._tables.ring_of_row[request]) * self.shape.size
            unread = torch.ones(self.shape.size, dtype=torch.bool)
            unread[self._draft_table[request, : length + block.size].long() - first] = False
            for buffer in kv_buffers(self._pool):
                buffer[first : first + self.shape.size][unread] = float("nan")
        return seen

    around("step", before_step)
    around("rings", then_poison_rings)  # before the window, whose cut rings have
    around("window", then_poison)


def sentinels() -> None:
    """Each step may change only its own slots and recurrent states, and a reservation only its own rows; between
    steps no slot changes; the state of padding stays finite."""
    copies: list[torch.Tensor] = []

    def guarded_forward(forward: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        table = table_of(self)
        # As integers, NaN is equal.
        buffers = [buffer.view(torch.int32) for pool in kv_pools(self) for buffer in kv_buffers(pool)]
        if not copies:
            copies.extend(buffer.clone() for buffer in buffers)
        slots, page_size = _own_slots(self, batch), self._reservation.page_size
        in_padding = sorted(set(slots.tolist()) & set(range(page_size)))
        assert not in_padding, f"live slots in the padding page: {in_padding[:4]}"
        table_before = table.clone()
        states = [rows.view(torch.int32) for rows in recurrent_states(self)]
        states_before, own_states = [rows.clone() for rows in states], _own_states(batch)
        result = forward(self, batch, *args, **kwargs)
        assert torch.equal(table, table_before), "a forward changed req_to_token"
        for rows, before in zip(states, states_before, strict=True):
            assert rows[:, 0].view(torch.float32).isfinite().all(), "the state of padding"
            changed = set((rows != before).transpose(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist())
            assert changed <= own_states, (
                f"states {sorted(changed - own_states)} belong to no request of the batch"
            )
        for buffer, copy in zip(buffers, copies, strict=True):
            copy[slots] = buffer[slots]
            copy[:page_size] = buffer[:page_size]  # a graph's padding rows
            if not torch.equal(buffer, copy):
                changed = (buffer != copy).flatten(1).any(dim=1).nonzero().flatten().tolist()
                raise AssertionError(f"slots {changed} belong to no request of the batch")
        return result

    def guarded_reserve(reserve: Any, self: Any, batch: Any) -> Any:
        table = batch.req_to_token_pool.req_to_token
        before = table.clone()
        allocated = {req.kv.req_pool_idx: req.kv.kv_allocated_len for req in batch.reqs}
        result = reserve(self, batch)
        for row, column in (table != before).nonzero().tolist():
            assert row in allocated, f"row {row} belongs to no request of the batch"
            assert allocated[row] <= column < self.row_limit, f"column {column} of row {row}"
        return result

    around("batch", guarded_forward)
    around("reservation", guarded_reserve)


def _own_slots(worker: Any, batch: Any) -> torch.Tensor:
    """[n]: KV slots that a forward of this batch may write."""
    if batch.forward_mode.is_extend():
        return batch.out_cache_loc.clone().long()
    table = table_of(worker)
    seq_lens = worker._slots.relay.new_seq_lens[batch.req_pool_indices]
    start = seq_lens.clamp(max=longest_prefix(worker.target_worker.model_runner))
    columns = start[:, None] + torch.arange(_reach(worker, batch))
    columns.clamp_(max=table.shape[1] - 1)
    return table[batch.req_pool_indices.long()[:, None], columns].flatten().long()


def _reach(worker: Any, batch: Any) -> int:
    """Slots past its prefix that a step of this batch may write of each: of a block, a tree or a chain; none of an
    idle batch."""
    if batch.forward_mode.is_idle():
        return 0
    served = worker._states.trees if batch.spec_info.no_trees is None else {}
    trees = (nodes for nodes, most in served.items() if len(batch.reqs) <= most)
    return max(worker.block_size, batch.spec_info.chain, *trees)


def _own_states(batch: Any) -> set[int]:
    """Slots of recurrent states that a step of this batch may write: its requests', those that the prefix cache
    takes of them, and that of padding."""
    slots = {0}
    if hasattr(batch.req_to_token_pool, "mamba_pool"):
        slots.update(batch.req_to_token_pool.get_mamba_indices(batch.req_pool_indices).tolist())
        kept = [req.kv.mamba_ping_pong_track_buffer for req in batch.reqs]
        slots.update(slot for buffer in kept if buffer is not None for slot in buffer.tolist())
    return slots
