"""What a step verifies: the rows of its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.accept import Paths, Ragged
from dflash_sglang.kernels.block.pack_rows import Rows

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout


class Shape(NamedTuple):
    """Chains of `width` rows for all requests; with a budget, the first rows of each chain, so many together; with
    nodes, trees of so many nodes, grown from blocks of `width`; with a chain, so many rows of each request, a
    block of `width` and what its copy goes on with."""

    width: int
    budget: int | None = None
    nodes: int | None = None
    chain: int | None = None


class Excluded(NamedTuple):
    """Why a step of a batch may not be of a form, one word each; None where it may."""

    ragged: str | None = None  # as many rows of each request, then
    trees: str | None = None
    copies: str | None = None  # chains of more rows than a block


class Places(NamedTuple):
    """Where the rows of blocks lie among the rows of a step, [bs, block] int64 each. The last row of a request
    stands for those that its block has beyond."""

    rows: Tensor  # numbers of the step's rows
    offsets: Tensor  # of each in its block

    def of_blocks(self, values: Tensor, rows: int) -> Tensor:
        """values [bs * block, ...] of all rows of blocks -> [rows, ...] of the step's rows."""
        values = values.view(*self.rows.shape, *values.shape[1:])
        out = values.new_empty((rows, *values.shape[2:]))
        out[self.rows] = values[torch.arange(len(values), device=values.device)[:, None], self.offsets]
        return out


class VerifyRows(NamedTuple):
    """The rows of one step, one request after the other."""

    rows: Rows
    size: int  # rows of each request; of ragged chains the most
    committed: int  # tokens that a request can commit
    layout: RaggedVerifyLayout | None = None  # of ragged chains, for attention
    ragged: Ragged | None = None  # of ragged chains, for the accept
    paths: Paths | None = None  # of trees

    @classmethod
    def of_block(cls, block: Block, proposals: Proposals) -> VerifyRows:
        """Chains of the block's width."""
        rows = block.rows._replace(ids=proposals.tokens.view(-1))
        return cls(rows, block.size, block.size)

    @classmethod
    def of_chains(cls, block: Block, rows: Rows) -> VerifyRows:
        """Chains of more rows than this block has; rows [rows]."""
        size = len(rows.ids) // block.batch_size
        return cls(rows, size, size)

    def plan(self, block: Block) -> KVLocPlan:
        """The rows' slots in every pool's own ids."""
        return block.loc_plan if self.rows.slots is block.rows.slots else block.plan_of(self.rows.slots, self.size)

    def by_request(self, rows: Tensor) -> Tensor:
        """rows [rows] -> [bs, size], or as they are for ragged chains."""
        return rows if self.ragged is not None else rows.view(-1, self.size)

    def places(self, requests: int, block: int) -> Places:
        """Of chains, or of the ragged rows of blocks of so many."""
        lane = torch.arange(block, device=self.rows.ids.device)
        if self.ragged is None:
            rows = torch.arange(requests * block, device=lane.device).view(requests, -1)
            return Places(rows, lane.expand(requests, -1))
        offsets = lane.minimum(self.ragged.lens.long()[:, None] - 1)
        return Places(self.ragged.starts[:requests].long()[:, None] + offsets, offsets)
