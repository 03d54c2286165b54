"""Proposals as the draft's config shapes them: from a head of its own, with scaled and capped logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_sglang.checkpoint import VocabularySpec
from dflash_sglang.models.head.target_head import TargetHead


class DraftHead(TargetHead):
    """A `TargetHead` whose rows may be other ids than the target's, and whose logits may be shaped.

    lm_head: as for `TargetHead`. target_ids: the target's id of each row of the whole head [draft vocabulary]
    int64, None where rows are ids. `logits` are those of the rows, unshaped: the shape is monotone.
    """

    def __init__(
        self, lm_head: nn.Module, spec: VocabularySpec, target_ids: Tensor | None, same_batch: int | None = None
    ) -> None:
        super().__init__(lm_head, same_batch)
        self._multiplier = spec.logit_multiplier
        self._softcap = spec.logit_softcap
        self._target_ids = target_ids

    @torch.no_grad()
    def greedy(self, hidden: Tensor) -> Tensor:
        """The target's ids [N] int64 of the largest logits of hidden [N, hidden]."""
        return self._as_target_ids(super().greedy(hidden))

    @torch.no_grad()
    def chances(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The target's ids [N] int64 of the largest logits, and the logprobs [N] float32 of the shaped ones."""
        rows, logprobs = super().chances(hidden)
        return self._as_target_ids(rows), logprobs

    @torch.no_grad()
    def likeliest(self, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The target's ids [N, count] int64 and shaped logits [N, count] float32 of the largest logits."""
        rows, logits = super().likeliest(hidden, count)
        return self._as_target_ids(rows), self._shaped(logits)

    def _as_target_ids(self, rows: Tensor) -> Tensor:
        return rows if self._target_ids is None else self._target_ids[rows]

    def _shaped(self, logits: Tensor) -> Tensor:
        if self._multiplier != 1.0:
            logits = logits * self._multiplier
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)
