"""Accepts verified blocks, within what each request may commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.drafting.step_slots import StepSlots
from dflash_sglang.kernels.block.accept import Paths, Ragged, Verification, accept
from dflash_sglang.sglang_names.scheduler import async_h2d

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from dflash_sglang.drafting.block import Block


class Answers(Protocol):
    """Answers in the target's place: a measurement whose accept lengths are not the target's."""

    trees: bool  # whether it knows the answers after a tree's nodes

    def foretell(self, batch: ScheduleBatch, block: Block, proposals: Proposals) -> Proposals:
        """Take note of a step, and return its proposals with the chances that they have. May write over tokens."""

    def answered(self, blocks: Verification, paths: Paths | None) -> Verification:
        """The blocks, or trees, with other tokens and answers. Capturable in a CUDA graph."""


class Acceptor:
    """Accepts blocks into the slot of the step that runs. All its buffers keep their place, so that a captured
    graph can accept."""

    def __init__(self, slots: StepSlots, answers: Answers | None = None) -> None:
        """answers: in the target's place, for blocks as wide and as many requests as the slots are for."""
        self.slots, self.answers, self.block_size = slots, answers, slots.block_size
        rows = slots.max_requests
        self._max_commit = torch.full((rows,), slots.longest, dtype=torch.int32, device=slots.device)
        self._max_commit_on_host = np.full(rows, slots.longest)

    def accept(
        self,
        tokens: torch.Tensor,  # [bs, block] last token + proposals
        target_ids: torch.Tensor,  # [bs, block] the target's token after each row
        prefix_lens: torch.Tensor,  # [bs]
        requests: torch.Tensor,  # [bs] rows of req_to_token
        ragged: Ragged | None = None,  # where the first two are [rows] of different numbers for each request
        paths: Paths | None = None,  # where the first two are [bs, N] of trees
    ) -> None:
        """In one launch, capturable in a CUDA graph. See `kernels.block.accept`.

        A graph may be padded beyond the rows of req_to_token, where ranks that share a batch take shares of one
        size each. Such requests are nobody's, and have no room among the outcomes.
        """
        most = len(self.slots.relay.new_seq_lens)
        if len(requests) > most:
            prefix_lens, requests = prefix_lens[:most], requests[:most]
            if ragged is None:
                tokens, target_ids = tokens[:most], target_ids[:most]
            else:
                ragged = ragged._replace(lens=ragged.lens[:most])
        blocks = Verification(
            tokens, target_ids, prefix_lens, requests, self.slots.current, self._max_commit, ragged
        )
        if self.answers is not None:
            blocks = self.answers.answered(blocks, paths)
        accept(blocks, self.slots.outcomes, self.slots.relay, paths)

    def set_max_commit(self, requests: np.ndarray, max_commit: np.ndarray) -> None:
        """From the next step on, no step commits more than max_commit [n] tokens of the requests [n], rows of
        req_to_token. Launches nothing where that was so before."""
        other = self._max_commit_on_host[requests] != max_commit
        if other.any():
            requests, max_commit = requests[other], max_commit[other]
            self._max_commit_on_host[requests] = max_commit
            rows, values = async_h2d(
                [requests.tolist(), max_commit.tolist()], dtype=torch.int64, device=self._max_commit.device
            )
            self._max_commit[rows] = values.int()

    def clip_to_limits(self, proposals: Proposals, batch: ScheduleBatch) -> Proposals:
        """Proposals with logprobs as the accept will have it: no chance beyond what a request may commit."""
        logprobs, best, rows = proposals.logprobs, proposals.best, batch.req_pool_indices_cpu.numpy()
        if logprobs is None or self._max_commit_on_host.take(rows).min() >= self.block_size:
            return proposals
        lane = torch.arange(logprobs.shape[1], device=logprobs.device)
        beyond = lane >= self._max_commit[batch.req_pool_indices][:, None] - 1
        if best is not None:
            best = best._replace(logprobs=best.logprobs.masked_fill(beyond[:, :, None], float("-inf")))
        return proposals._replace(logprobs=logprobs.masked_fill(beyond, float("-inf")), best=best)
