"""Blocks that are verified in part: of each request as many of its first rows as its proposals are worth."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dflash_sglang.drafting.block import Block, Rows, VerifiedPart
from dflash_sglang.kernels.block import pack_rows as packing
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.kernels.block.share_rows import share_rows
from dflash_sglang.sglang_names.scheduler import RaggedVerifyLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class RowPacker:
    """Packs the rows that are verified request after request, in buffers that keep their place."""

    def __init__(
        self, target_runner: ModelRunner, block_size: int, slots: Callable[[int, int], int | None]
    ) -> None:
        """block_size: of the widest blocks. slots: requests that the graph for so many tokens is captured with, by
        tokens and batch size; None where there is no graph for them."""
        self._runner, self._block_size, self._slots = target_runner, block_size, slots
        table = target_runner.req_to_token_pool.req_to_token
        self._device = table.device
        rows, requests = table.shape[0] * block_size, table.shape[0] + 1
        self._lens, self._starts = (
            torch.zeros(requests, dtype=torch.int32, device=self._device) for _ in range(2)
        )
        self._buffers = Rows(*(torch.empty(rows, dtype=torch.int64, device=self._device) for _ in range(3)))

    def pack(
        self, batch: ScheduleBatch, block: Block, ids: torch.Tensor, logprobs: torch.Tensor, rows: int
    ) -> Block:
        """The block with so many rows alone, those of the likeliest proposals. ids [bs, block]: last token +
        proposals; logprobs [bs, block - 1] of these."""
        bs, slots = block.batch_size, self._slots(rows, block.batch_size)
        padded = bs if slots is None else slots
        lens, starts = self._lens[:padded], self._starts[: padded + 1]
        share_rows(logprobs, rows, lens, starts)
        packed = Rows(*(buffer[:rows] for buffer in self._buffers))
        packing.pack_rows(
            packing.Rows(ids, block.positions, block.slots), starts[:bs], lens[:bs], packing.Rows(*packed)
        )
        layout = RaggedVerifyLayout(
            verify_lens=lens,
            graph_num_tokens=rows,
            extend_start_loc=starts[:-1],
            qo_indptr_device=starts,
            # A padded layout is staged as it is: SGLang asks for a cap then, and for no host copy.
            verify_lens_cpu=lens.tolist() if slots is None else None,
            total_verify_tokens=rows,
            cap=None if slots is None else self._block_size,
        )
        loc_plan = self._runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=block.prefix_lens,
            seq_lens_cpu=block.loc_plan.seq_lens_cpu,
            write_virtual=packed.slots,
            read_extent=block.size,
        )
        ragged = Ragged(starts, lens[:bs], self._block_size)
        return replace(block, rows=packed, loc_plan=loc_plan, part=VerifiedPart(layout, ragged))
