"""Blocks that are verified in part: of each request as many of its first rows as the step gives it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from dflash_sglang.compat import RaggedVerifyLayout, async_h2d
from dflash_sglang.drafting.block import Block, Rows
from dflash_sglang.kernels import pack_rows as packing
from dflash_sglang.kernels.accept import Ragged

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from dflash_sglang.scheduling.width.shares import Shares

ALIGNED = 4  # int32 in 16 bytes: at other addresses Triton compiles another kernel


@dataclass
class VerifiedPart:
    """Of a batch's blocks, for attention and for the accept."""

    layout: RaggedVerifyLayout
    ragged: Ragged


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
        rows = table.shape[0] * block_size
        self._buffers = Rows(*(torch.empty(rows, dtype=torch.int64, device=self._device) for _ in range(3)))

    def pack(self, batch: ScheduleBatch, block: Block, tokens: torch.Tensor, shares: Shares) -> Block:
        """The block with these rows alone. tokens [bs, block]: last token + proposals."""
        lens, bs = shares.lens.tolist(), block.batch_size
        total = sum(lens)
        slots = self._slots(total, bs)
        padded = bs if slots is None else slots
        second = -(-(padded + 1) // ALIGNED) * ALIGNED
        starts = [0, *np.cumsum(shares.lens).tolist(), *[total] * (second - bs - 1)]
        host = [*starts, *lens, *[0] * (padded - bs)]
        device = async_h2d(host, dtype=torch.int32, device=self._device)
        starts_device, lens_device = device[: padded + 1], device[second:]
        rows = Rows(*(buffer[:total] for buffer in self._buffers))
        packing.pack_rows(
            packing.Rows(tokens, block.positions, block.slots),
            starts_device[:bs],
            lens_device[:bs],
            packing.Rows(*rows),
        )
        layout = RaggedVerifyLayout(
            verify_lens=lens_device,
            graph_num_tokens=total,
            extend_start_loc=starts_device[:-1],
            qo_indptr_device=starts_device,
            # A padded layout is staged as it is: SGLang asks for a cap then, and for no host copy.
            verify_lens_cpu=lens if slots is None else None,
            total_verify_tokens=total if slots is None else None,
            cap=None if slots is None else self._block_size,
        )
        loc_plan = self._runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=block.prefix_lens,
            seq_lens_cpu=block.loc_plan.seq_lens_cpu,
            write_virtual=rows.slots,
            read_extent=block.size,
        )
        ragged = Ragged(starts_device, lens_device[:bs], self._block_size)
        return replace(block, rows=rows, loc_plan=loc_plan, part=VerifiedPart(layout, ragged))
