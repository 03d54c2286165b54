"""Steps that verify more rows than a block: what is copied of a request's text goes on behind its block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.copies import Copies
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.pack_rows import Rows
from dflash_sglang.verify.rows import VerifyRows, plan_rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class ChainVerify:
    """Lays out the rows of long chains, in buffers that keep their place."""

    def __init__(self, target: ModelRunner, copies: Copies, chains: Mapping[int, int]) -> None:
        """chains: {rows: the most requests of a step}."""
        self._runner, self._copies = target, copies
        most = max((rows * requests for rows, requests in chains.items()), default=0)
        self._buffers = Rows(*(torch.zeros(most, dtype=torch.int64, device=target.device) for _ in range(3)))

    def choose(self, batch: ScheduleBatch, block: Block, proposals: Proposals, chain: int) -> VerifyRows:
        """`chain` rows of each request: the block's, then its copy's."""
        rows = Rows(*(buffer[: block.batch_size * chain] for buffer in self._buffers))
        self._copies.extend(block, proposals, rows)
        return VerifyRows(rows, plan_rows(self._runner, batch, block, rows.slots, chain), chain, chain)
