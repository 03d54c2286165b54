"""What a decode step hands the scheduler: its tokens and accept lengths reach the host in one copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dflash_sglang.sglang_names.scheduler import GenerationBatchResult, async_d2h


@dataclass
class StepResult(GenerationBatchResult):
    """SGLang's result, whose `accept_lens` [bs] int32 and `next_token_ids` [bs * block] are parts of `packed`."""

    if TYPE_CHECKING:  # SGLang's fields
        accept_lens: torch.Tensor
        next_token_ids: torch.Tensor

    packed: torch.Tensor | None = None  # [n] int64, see `Accepted`
    logprobs: torch.Tensor | None = None  # [bs, steps] float32, see `Proposals`
    verified_lens: torch.Tensor | None = None  # [bs] int32 of a ragged step

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        assert self.packed is not None
        packed = async_d2h(self.packed)
        if self.logprobs is not None:
            self.logprobs = async_d2h(self.logprobs)
        if self.verified_lens is not None:
            self.verified_lens = async_d2h(self.verified_lens)
        self.accept_lens = packed.view(torch.int32)[: len(self.accept_lens)]
        self.next_token_ids = packed[len(packed) - len(self.next_token_ids) :]
        super().copy_to_cpu(return_logprob, return_hidden_states)  # what is on the host stays as it is
