"""A batch of blocks: the tensors that draft and verify share within one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_sglang.attention.verifying import slot_plan
from dflash_sglang.drafting.replays import most_padded
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.kernels.block.pack_rows import Rows
from dflash_sglang.kernels.block.prepare_block import BlockSources, BlockTensors, prepare_block
from dflash_sglang.patches.graphs import GraphInputs
from dflash_sglang.settings.width import PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner


def longest_prefix(runner: ModelRunner) -> int:
    """Committed tokens of a request that needs another step, at most: SGLang ends it before its context is full.

    Attention backends have room for a block after it (`patches.attention_room`).
    """
    return runner.model_config.context_len - 1


@dataclass
class Block:
    """The blocks of one step, one per request."""

    ids: torch.Tensor  # [bs, block] last committed token + mask tokens, which the draft's proposals overwrite
    positions: torch.Tensor  # [bs, block]
    slots: torch.Tensor  # [bs, block] as req_to_token names them
    prefix_lens: torch.Tensor  # [bs] committed tokens with KV
    requests: torch.Tensor  # [bs] rows of req_to_token
    kv_len_bounds: torch.Tensor  # [bs] on the host: no request's prefix + block is longer
    prefix_bounds_sum: int  # of these, without the blocks: attention backends add them
    rows: Rows  # of ids, positions and slots, row by row
    runner: ModelRunner  # whose requests these are
    padded: int  # requests of which graphs find rows here, those that only pad among them
    draft_slots: torch.Tensor | None = None  # [bs, block] in rings; None: the draft names slots alike
    requests_cpu: torch.Tensor | None = None  # of a draft with rings
    exact: bool = False  # whether the bounds are the lengths

    @property
    def batch_size(self) -> int:
        return self.ids.shape[0]

    @property
    def size(self) -> int:
        return self.ids.shape[1]

    @cached_property
    def loc_plan(self) -> KVLocPlan:
        """The same slots in every pool's own ids."""
        return self.plan_of(self.rows.slots, self.size)

    def plan_of(self, slots: torch.Tensor, rows: int) -> KVLocPlan:
        """As `loc_plan`, of so many rows of each request, in these slots."""
        prefixes = self.kv_len_bounds - self.size
        return slot_plan(self.runner, self.requests, self.prefix_lens, prefixes, slots, rows)

    def without_last(self) -> Block:
        """Blocks of all rows but the last; copies."""
        ids, positions, slots = (of[:, :-1].contiguous() for of in (self.ids, self.positions, self.slots))
        in_rings = None if self.draft_slots is None else self.draft_slots[:, :-1].contiguous()
        return replace(
            self, ids=ids, positions=positions, slots=slots, kv_len_bounds=self.kv_len_bounds - 1,
            rows=Rows(ids.view(-1), positions.view(-1), slots.view(-1)), draft_slots=in_rings,
        )  # fmt: skip


class BlockBuilder:
    """Builds the step's `Block` in buffers that keep their place for the life of the worker: the inputs of the
    graph that drafts, which one that verifies blocks of this width shares, or its own."""

    def __init__(
        self,
        target_runner: ModelRunner,
        draft_runner: ModelRunner,
        block_size: int,
        mask_token_id: int,
        slots: StepSlots,
        in_place: bool,
        draft_slots: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ):
        """block_size: of the widest blocks; slots: where requests stand, and whose next slot a build takes;
        in_place: whether draft and target take the blocks as they are, so that graph inputs which they share have
        the same contents for both; draft_slots: gives blocks slots of the draft's own, by their requests, prefixes
        and slots (`DraftRings.assign_block`)."""
        self._runner, self._draft_runner = target_runner, draft_runner
        self._mask_token_id = mask_token_id
        self._longest = longest_prefix(target_runner)
        self._slots = slots
        self._in_place, self._draft_slots = in_place, draft_slots
        self._req_to_token = target_runner.req_to_token_pool.req_to_token
        max_requests = self._req_to_token.shape[0]

        def buffer(rows: int) -> torch.Tensor:
            return torch.empty(rows, dtype=torch.int64, device=self._req_to_token.device)

        rows = max_requests * block_size
        self._own = GraphInputs(*map(buffer, (rows, rows, rows, max_requests, max_requests)))
        self._of: Any = None  # the requests, width and graphs that the views are for

    def build(self, batch: ScheduleBatch, width: int) -> Block:
        """Blocks of `width` for a decode batch whose slots `prepare_for_decode` has reserved."""
        bs = len(batch.reqs)
        of = bs, width, id(self._runner.decode_cuda_graph_runner)
        if self._of != of:  # views outlive the step: most steps are like the last
            self._of = of
            self._look(bs, width)
        sources = BlockSources(*self._slots.relay, batch.req_pool_indices, self._req_to_token)
        place = self._slots.next()
        prepare_block(sources, self._mask_token_id, self._longest, place, self._padded, self._filler)
        exact = batch.seq_lens_cpu is not None
        if exact:
            prefixes = np.minimum(batch.seq_lens_cpu.numpy(), self._longest)
            kv_len_bounds, prefixes_sum = torch.from_numpy(prefixes + width), int(np.add.reduce(prefixes))
        else:
            kv_len_bounds = batch.spec_info.nxt_kv_lens_cpu
            prefixes_sum = batch.spec_info.nxt_kv_lens_sum - bs * width
        runner, padded = self._runner, len(self._padded.requests)
        block = Block(*self._tensors[:-1], kv_len_bounds, prefixes_sum, self._rows, runner, padded, exact=exact)
        if self._draft_slots is not None:
            block.draft_slots = self._draft_slots(block.requests, block.prefix_lens, block.slots)
            block.requests_cpu = batch.req_pool_indices_cpu
        return block

    def _inputs(self, bs: int, width: int) -> GraphInputs:
        if not self._in_place:
            return self._own
        drafted = None if width == PLAIN else GraphInputs.of(self._draft_runner, bs, bs * width)
        return drafted or GraphInputs.of(self._runner, bs, bs * width) or self._own

    def _look(self, bs: int, width: int) -> None:
        """Find where blocks of a width lie, behind them requests that only pad where graphs replay as they are."""
        inputs = self._inputs(bs, width)
        *of_rows, prefix_lens, requests = inputs
        runners = (self._draft_runner, self._runner)[width == PLAIN :]
        padded = [most_padded(runner, bs, inputs) for runner in runners]
        most = min(max(of[0] for of in padded), len(inputs.input_ids) // width, len(inputs.seq_lens))

        def views(n: int) -> BlockTensors:
            ids, positions, slots = (buffer[: n * width].view(n, width) for buffer in of_rows)
            return BlockTensors(ids, positions, slots, prefix_lens[:n], requests[:n], self._slots.current)

        self._tensors, self._padded = views(bs), views(most)
        self._rows = Rows(*(of.view(-1) for of in self._tensors[:3]))
        self._filler = max(of[1] for of in padded)
