"""Copies: proposals from a request's own text, where they promise more than the draft's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.block.find_copy import (
    FAILED,
    CopyRows,
    CopyTables,
    extend_copies,
    find_copies,
    write_copies,
)
from dflash_sglang.kernels.block.pack_rows import Rows
from dflash_sglang.kernels.head.pack_shard import Candidates
from dflash_sglang.requests.limits import may_copy
from dflash_sglang.settings.width import PLAIN
from dflash_sglang.sglang_names.scheduler import ForwardBatch, ModelRunner, ScheduleBatch, async_h2d


class Copies:
    """The token of every KV slot, and what each request's steps have shown of copies and of the draft.

    A slot keeps its token as long as its KV. So the radix cache, chunks, sessions and retracted requests need
    nothing more. A wrong token would cost acceptance, and never change the output.
    """

    def __init__(self, target: ModelRunner, longest: int) -> None:
        """Target and draft write to the slots that req_to_token names. longest: rows that a step verifies of a
        request, at most."""
        allocator, self._vocab = target.token_to_kv_pool_allocator, target.model_config.vocab_size
        slots = allocator.size_full + allocator.page_size
        self._tables = CopyTables.allocate(slots, target.req_to_token_pool.req_to_token, longest)
        self._always = torch.ones(1, dtype=torch.int32, device=self.history.device)
        self._of_graphs, self._in_graphs = self._always.clone(), True  # on the device, and here

    @property
    def history(self) -> Tensor:
        """[slots] int32: the token of each slot, as of keys and values: see `CopyTables`."""
        return self._tables.history

    @property
    def nbytes(self) -> int:
        """Of the device; req_to_token is the target's."""
        return sum(tensor.nbytes for tensor in self._tables) - self._tables.req_to_token.nbytes

    def prefill(self, batch: ScheduleBatch) -> None:
        """Keep the tokens of a batch before it is prefilled. The records of its new requests begin.

        Placeholders of images are tokens outside of the vocabulary, which match nothing. Copies of a request that
        forbids them are said to have failed.
        """
        if batch.forward_mode.is_idle():
            return
        self._begin(batch, len(batch.reqs) - len(batch.decoding_reqs or ()), batch.input_ids, batch.out_cache_loc)

    def arrive(self, batch: ScheduleBatch) -> None:
        """As `prefill`, of requests that another server has prefilled: their tokens are on the host only."""
        ids, slots = list[int](), []
        lens, rows = batch.seq_lens_cpu.tolist(), batch.req_pool_indices_cpu.tolist()
        for req, row, length in zip(batch.reqs, rows, lens, strict=True):
            ids += [*req.origin_input_ids, *req.output_ids][:length]  # the last output has no slot yet
            slots.append(self._tables.req_to_token[row, :length])
        on_device = async_h2d(ids, dtype=torch.int64, device=self.history.device)
        self._begin(batch, len(batch.reqs), on_device, torch.cat(slots).long())

    def _begin(self, batch: ScheduleBatch, new: int, ids: Tensor, slots: Tensor) -> None:
        """ids, slots [n]: of tokens. The first `new` requests of the batch are new."""
        inside = (ids >= 0) & (ids < self._vocab)
        self.history[slots] = ids.where(inside, -1).int()
        rows = batch.req_pool_indices
        # Not `last[rows] = 0`: torch would copy the number to the device, and wait for it.
        self._tables.last.index_fill_(0, rows, 0)
        self._tables.record.index_fill_(0, rows[:new], 0)
        forbid = [
            at
            for at, req in enumerate(batch.reqs[:new])
            if not (req.to_finish or may_copy(req.sampling_params.custom_params))
        ]
        if forbid:
            index = async_h2d(forbid, dtype=torch.int64, device=ids.device)
            self._tables.record[:, FAILED].index_fill_(0, rows[index], math.inf)

    def in_graphs(self, do: bool) -> None:
        """Whether the draft's graphs write copies (`write`) from now on."""
        if do != self._in_graphs:
            self._in_graphs = do
            self._of_graphs.fill_(int(do))

    def write(self, ids: Tensor, batch: ForwardBatch, logprobs: Tensor, best: Candidates | None) -> None:
        """Replace certain proposals of requests whose text promises more, as a draft's graph ends. Padding belongs
        to request 0 and slot 0, which are nobody's.

        ids [bs, block] and the batch: inputs of the graph. logprobs, best: as `Proposals` has them."""
        slots = batch.out_cache_loc[: ids.numel()].view(ids.shape)
        rows = CopyRows(ids, slots, batch.seq_lens, batch.req_pool_indices, logprobs=logprobs, best=best)
        find_copies(rows, self._tables, self._of_graphs)
        write_copies(rows, self._tables, self._of_graphs)

    def promised(self, requests: int) -> Tensor:
        """What the latest step's copies promise: see `Proposals`."""
        return self._tables.promised[:requests]

    def propose(self, batch: ScheduleBatch, block: Block, proposals: Proposals) -> Proposals:
        """Replace the proposals of requests whose text promises more; in place, in two launches, where the draft's
        graph has not."""
        del batch
        if proposals.promised is not None:
            return proposals
        drawn = proposals.candidates.shape[2] > 1  # certain ones are a view of the tokens
        drawn_from = Candidates(proposals.candidates, proposals.probs) if drawn else None
        of_block = proposals.tokens, block.slots, block.prefix_lens, block.requests
        rows = CopyRows(*of_block, drawn_from, proposals.logprobs, proposals.best)
        if block.size == PLAIN:
            write_copies(rows, self._tables, self._always)
            return proposals
        with torch.inference_mode():  # in which candidates are drawn
            find_copies(rows, self._tables, self._always)
            write_copies(rows, self._tables, self._always)
        return proposals._replace(promised=self.promised(block.batch_size))

    def extend(self, block: Block, proposals: Proposals, length: int) -> Rows:
        """The rows [bs * length] of chains that are longer than this block: its proposals, then their copy."""
        rows = CopyRows(proposals.tokens, block.slots, block.prefix_lens, block.requests)
        return Rows(*(of.flatten() for of in extend_copies(rows, self._tables, length)))

    def forget_steps(self) -> None:
        """Count from zero, as if there had been no step."""
        self._tables.counts.zero_()

    def snapshot(self) -> dict[str, Any]:
        """What /server_info tells, since start-up. Waits for the device."""
        steps, within, accepted, matched, beyond = self._tables.counts.tolist()
        return {
            "request_steps": steps,
            "proposed": within + beyond,
            "beyond_block": beyond,
            "accepted": accepted,
            "mean_match": matched / steps if steps else 0.0,
        }
