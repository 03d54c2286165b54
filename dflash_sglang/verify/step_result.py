"""What a decode step hands the scheduler: its tokens and accept lengths reach the host in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dflash_sglang.drafting.draft_input import DFlashDraftInput
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.sglang_names.scheduler import GenerationBatchResult, async_d2h
from dflash_sglang.verify.rows import VerifyRows
from dflash_sglang.verify.verifier import Verified


class Drafted(NamedTuple):
    """What the draft thought of a step, on the host."""

    logprobs: np.ndarray | None = None  # [bs, steps] float32, see `Proposals`
    lens: np.ndarray | None = None  # [bs] int32, verified rows of a ragged step
    mass: np.ndarray | None = None  # [bs, N] float32 of a step of trees, see `Tree`
    promised: np.ndarray | None = None  # [bs] float32, see `Proposals`


@dataclass
class StepResult(GenerationBatchResult):
    """SGLang's result, whose `accept_lens` [bs] int32 and `next_token_ids` [bs * block] are parts of `packed`."""

    if TYPE_CHECKING:  # SGLang's fields
        accept_lens: torch.Tensor
        next_token_ids: torch.Tensor

    packed: torch.Tensor | None = (
        None  # [n] int64: `accept_lens`; from `start` on `next_token_ids`, then `drafted`
    )
    start: int = 0
    columns: Sequence[int] = ()  # of each part of `drafted`, 0 where it is None

    @classmethod
    def from_verified(
        cls,
        verified: Verified,
        proposals: Proposals,
        of: VerifyRows,
        next_input: DFlashDraftInput,
        chances: bool,
    ) -> StepResult:
        """Of a step that has launched its verify. chances: the host asks for those of what was drafted."""
        accepted, forward = verified.accepted, verified.forward
        bs, width = accepted.target_ids.shape
        end = accepted.start + bs * width
        # The next step writes to the buffers of these: one launch keeps them with the outcome.
        logprobs = proposals.logprobs if chances else None
        lens = None if of.ragged is None else of.ragged.lens.view(torch.float32)[:, None]
        mass = of.paths.tree.mass if chances and of.paths is not None else None
        promised = None if proposals.promised is None else proposals.promised[:, None]
        parts = logprobs, lens, mass, promised
        columns = [0 if part is None else part.shape[1] for part in parts]
        if more := bs * sum(columns):
            room = accepted.packed[end : (end := end + (more + 1) // 2)].view(torch.float32)
            torch.cat([part for part in parts if part is not None], 1, out=room[:more].view(bs, -1))
        return cls(
            logits_output=forward.logits_output,
            next_token_ids=accepted.target_ids.view(-1),
            accept_lens=accepted.commit_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=next_input,
            can_run_cuda_graph=forward.can_run_cuda_graph,
            speculative_num_draft_tokens=width,
            routed_experts_output=forward.routed_experts_output,
            indexer_topk_output=forward.indexer_topk_output,
            packed=accepted.packed[:end],
            start=accepted.start,
            columns=columns,
        )

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        assert self.packed is not None
        packed, bs, start = async_d2h(self.packed), len(self.accept_lens), self.start
        end = start + len(self.next_token_ids)
        self.accept_lens = packed.view(torch.int32)[:bs]
        self.next_token_ids = packed[start:end]
        self.packed = packed[end:]
        super().copy_to_cpu(return_logprob, return_hidden_states)  # what is on the host stays as it is

    def drafted(self) -> Drafted:
        """Once the copy to the host is done. Copies: on a CPU a later step writes there."""
        assert self.packed is not None
        if not (more := (bs := len(self.accept_lens)) * sum(self.columns)):
            return Drafted()
        together = self.packed.numpy().view(np.float32)[:more].reshape(bs, -1).copy()
        ends = zip(self.columns, accumulate(self.columns), strict=True)
        logprobs, lens, mass, promised = [together[:, end - n : end] if n else None for n, end in ends]
        lens, promised = [of if of is None else of[:, 0] for of in (lens, promised)]
        return Drafted(logprobs, lens if lens is None else lens.view(np.int32), mass, promised)


def idle_result(draft_input: DFlashDraftInput, block_size: int) -> Any:
    """SGLang's result of a step without requests."""
    return GenerationBatchResult(
        next_token_ids=draft_input.bonus_tokens,
        accept_lens=draft_input.new_seq_lens.int(),
        new_seq_lens=draft_input.new_seq_lens,
        next_draft_input=draft_input,
        can_run_cuda_graph=False,
        speculative_num_draft_tokens=block_size,
    )
