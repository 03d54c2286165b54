"""A batch of blocks: the tensors that draft and verify share within one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dflash_sglang.kernels.prepare_block import BlockSources, BlockTensors, Turn, prepare_block

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class Block:
    """The blocks of one step, one per request."""

    ids: torch.Tensor  # [bs, block] last committed token + mask tokens: the draft's input
    positions: torch.Tensor  # [bs, block]
    slots: torch.Tensor  # [bs, block] as req_to_token names them
    prefix_lens: torch.Tensor  # [bs] committed tokens with KV
    kv_len_bounds: torch.Tensor  # [bs] on the host: no request's prefix + block is longer
    kv_len_bounds_sum: int
    loc_plan: KVLocPlan  # the same slots in every pool's own ids

    @property
    def batch_size(self) -> int:
        return self.ids.shape[0]

    @property
    def size(self) -> int:
        return self.ids.shape[1]


class BlockBuilder:
    """Builds the step's `Block` in buffers that keep their place for the life of the worker."""

    def __init__(
        self, target_runner: ModelRunner, block_size: int, mask_token_id: int, row_limit: int, step: torch.Tensor
    ):
        """step [2]: where the device finds each step's turn."""
        self._runner = target_runner
        self._mask_token_id = mask_token_id
        self._row_limit = row_limit
        self._req_to_token = target_runner.req_to_token_pool.req_to_token
        max_requests = self._req_to_token.shape[0]

        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int64, device=self._req_to_token.device)

        self._buffers = BlockTensors(
            ids=buffer(max_requests, block_size),
            positions=buffer(max_requests, block_size),
            slots=buffer(max_requests, block_size),
            prefix_lens=buffer(max_requests),
            step=step,
        )

    def build(self, batch: ScheduleBatch, turn: Turn) -> Block:
        """The blocks of a decode batch whose slots `prepare_for_decode` has reserved."""
        bs, block_size = len(batch.reqs), self._buffers.ids.shape[1]
        buffers = self._buffers
        tensors = BlockTensors(
            buffers.ids[:bs], buffers.positions[:bs], buffers.slots[:bs], buffers.prefix_lens[:bs], buffers.step
        )
        sources = BlockSources(
            batch.spec_info.bonus_tokens, batch.seq_lens, batch.req_pool_indices, self._req_to_token
        )
        prepare_block(sources, self._mask_token_id, self._row_limit, turn, tensors)
        if batch.seq_lens_cpu is not None:
            kv_len_bounds = (batch.seq_lens_cpu + block_size).clamp_(max=self._row_limit)
        else:
            kv_len_bounds = batch.spec_info.nxt_kv_lens_cpu
        loc_plan = self._runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=tensors.prefix_lens,
            seq_lens_cpu=kv_len_bounds - block_size,
            write_virtual=tensors.slots.view(-1),
            read_extent=block_size,
        )
        return Block(*tensors[:-1], kv_len_bounds, int(kv_len_bounds.sum()), loc_plan)
