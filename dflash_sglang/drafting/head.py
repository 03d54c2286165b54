"""Proposals of a plain draft: the head's argmax of every row, or tokens drawn from its likeliest ones."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_sglang.checkpoint.vocabulary import DRAWN_FROM
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.models.head.target_head import TargetHead


class HeadProposals:
    """The `RowReader` of a plain draft.

    The graph ends with the head and, where proposals are drawn, with what they are drawn from. Tensors live in
    buffers: a replay writes where a capture wrote.
    """

    ranks_may_part = False  # the head hands every rank of its group the same tokens

    def __init__(
        self, head: TargetHead, max_requests: int, steps: int, drawn: bool, device: str, confident: bool = False
    ):
        """steps: proposals of the widest blocks; drawn, confident: whether `draw`, `logprobs` will be
        asked for."""
        self._head, self._drawn, self._confident = head, drawn, confident
        self._logprobs = torch.zeros(max_requests * steps if confident else 0, dtype=torch.float32, device=device)
        shape = (max_requests * steps if drawn else 0, DRAWN_FROM)
        self._candidates = torch.zeros(shape, dtype=torch.int64, device=device)
        self._logits = torch.zeros(shape, dtype=torch.float32, device=device)

    def write(self, rows: Tensor, tokens: Tensor) -> None:
        """rows after the anchor's -> the head's likeliest tokens."""
        bs, steps, _ = rows.shape
        if not self._drawn:
            if self._confident:
                ids, self._logprobs[: bs * steps] = self._head.chances(rows.flatten(0, 1))
            else:
                ids = self._head.greedy(rows.flatten(0, 1))
            tokens[:, 1:] = ids.view(bs, steps)
            return
        candidates, logits = self._head.likeliest(rows.flatten(0, 1), DRAWN_FROM)
        self._candidates[: bs * steps] = candidates
        self._logits[: bs * steps] = logits
        if self._confident:
            self._logprobs[: bs * steps] = logits.log_softmax(dim=-1)[:, 0]
        tokens[:, 1:] = candidates[:, 0].view(bs, steps)

    def write_nothing(self, rows: Tensor) -> None:
        """The collectives of `write` on no rows [0, hidden]."""
        if self._drawn:
            self._head.likeliest(rows, DRAWN_FROM)
        else:
            self._head.greedy(rows)

    def logprobs(self, bs: int, steps: int) -> Tensor | None:
        """Of the likeliest tokens, over the whole vocabulary; over their candidates where proposals are drawn."""
        return self._logprobs[: bs * steps].view(bs, steps) if self._confident else None

    def draw(self, tokens: Tensor, temperatures: Tensor, greedy: Tensor) -> Proposals:
        """Each token from the softmax of its candidates."""
        bs, steps = len(tokens), tokens.shape[1] - 1
        candidates, logits = (
            buffer[: bs * steps].view(bs, steps, -1) for buffer in (self._candidates, self._logits)
        )
        return Proposals.drawn(tokens, candidates, logits, temperatures, greedy)
