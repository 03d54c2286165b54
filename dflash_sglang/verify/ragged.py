"""Ragged steps: requests verify different numbers of rows, as many as their proposals are likely to need."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_sglang.drafting.block import Block
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.replays import replay_of
from dflash_sglang.kernels.block.accept import Ragged
from dflash_sglang.kernels.block.pack_rows import Rows, pack_rows
from dflash_sglang.kernels.block.share_rows import share_rows
from dflash_sglang.sglang_names.scheduler import ModelRunner, RaggedVerifyLayout
from dflash_sglang.verify.rows import VerifyRows


class RaggedVerify:
    """Chooses and packs the rows of ragged steps, in buffers that keep their place."""

    def __init__(
        self, target_runner: ModelRunner, block_size: int, captured_requests: Callable[[int, int], int | None]
    ) -> None:
        """block_size: of the widest blocks. captured_requests: requests that the graph for so many tokens is
        captured with, by tokens and batch size; None where no graph fits them."""
        self._runner, self._block_size, self._captured_requests = target_runner, block_size, captured_requests
        table = target_runner.req_to_token_pool.req_to_token
        rows, requests = table.shape[0] * block_size, table.shape[0] + 1
        self._lens, self._starts = (
            torch.zeros(requests, dtype=torch.int32, device=table.device) for _ in range(2)
        )
        self._buffers = Rows(*(torch.empty(rows, dtype=torch.int64, device=table.device) for _ in range(3)))

    def choose(self, block: Block, proposals: Proposals, budget: int) -> VerifyRows:
        """The `budget` rows of a step: each request's first, and those of the likeliest proposals.

        Raises ValueError for proposals without logprobs.
        """
        if proposals.logprobs is None:
            raise ValueError(
                "a ragged step: expected proposals with logprobs, found none. Set width to one number."
            )
        bs, captured = block.batch_size, self._captured_requests(budget, block.batch_size)
        padded, replay = bs if captured is None else captured, replay_of(self._runner, bs, budget)
        lens, starts = self._lens[:padded], self._starts[: padded + 1]
        if replay is not None and replay.ragged is not None:
            lens, starts = replay.ragged
        share_rows(proposals.logprobs, budget, lens, starts)
        rows = Rows(*(buffer[:budget] for buffer in self._buffers))
        pack_rows(Rows(proposals.tokens, block.positions, block.slots), starts[:bs], lens[:bs], rows)
        layout = RaggedVerifyLayout(
            verify_lens=lens,
            graph_num_tokens=budget,
            extend_start_loc=starts[:-1],
            qo_indptr_device=starts,
            # A padded layout is staged as it is: SGLang then asks for a cap, and for no copy on the host.
            verify_lens_cpu=lens.tolist() if captured is None else None,
            total_verify_tokens=budget,
            cap=None if captured is None else self._block_size,
        )
        most = self._block_size
        return VerifyRows(rows, most, most, layout, Ragged(starts, lens[:bs], most))
