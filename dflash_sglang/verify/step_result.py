"""What a decode step hands the scheduler: its tokens and accept lengths reach the host in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash_sglang.drafting.draft_input import DFlashDraftInput
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.sglang_names.scheduler import GenerationBatchResult, async_d2h
from dflash_sglang.verify.rows import VerifyRows
from dflash_sglang.verify.verifier import Verified


@dataclass
class StepResult(GenerationBatchResult):
    """SGLang's result, whose `accept_lens` [bs] int32 and `next_token_ids` [bs * block] are parts of `packed`."""

    if TYPE_CHECKING:  # SGLang's fields
        accept_lens: torch.Tensor
        next_token_ids: torch.Tensor

    packed: torch.Tensor | None = None  # [n] int64, see `Accepted`
    logprobs: torch.Tensor | None = None  # [bs, steps] float32, see `Proposals`
    verified_lens: torch.Tensor | None = None  # [bs] int32 of a ragged step
    mass: torch.Tensor | None = None  # [bs, N] float32 of a step of trees, see `Tree`
    promised: torch.Tensor | None = None  # [bs] float32, see `Proposals`

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
        return cls(
            logits_output=forward.logits_output,
            next_token_ids=accepted.target_ids.view(-1),
            accept_lens=accepted.commit_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=next_input,
            can_run_cuda_graph=forward.can_run_cuda_graph,
            speculative_num_draft_tokens=accepted.target_ids.shape[1],
            routed_experts_output=forward.routed_experts_output,
            indexer_topk_output=forward.indexer_topk_output,
            packed=accepted.packed,
            # The next step writes to the same buffers while these are copied.
            logprobs=proposals.logprobs.clone() if chances and proposals.logprobs is not None else None,
            verified_lens=None if of.ragged is None else of.ragged.lens.clone(),
            mass=of.paths.tree.mass.clone() if chances and of.paths is not None else None,
            promised=None if proposals.promised is None else proposals.promised.clone(),
        )

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        assert self.packed is not None
        packed = async_d2h(self.packed)
        self.logprobs, self.verified_lens, self.mass, self.promised = (
            None if tensor is None else async_d2h(tensor)
            for tensor in (self.logprobs, self.verified_lens, self.mass, self.promised)
        )
        self.accept_lens = packed.view(torch.int32)[: len(self.accept_lens)]
        self.next_token_ids = packed[len(packed) - len(self.next_token_ids) :]
        super().copy_to_cpu(return_logprob, return_hidden_states)  # what is on the host stays as it is


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
