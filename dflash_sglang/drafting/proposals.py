"""Proposals of a step: certain (the draft's argmax) or drawn from the draft's own distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Proposals(NamedTuple):
    """What the draft proposes, and what else it could have proposed."""

    tokens: Tensor  # [bs, block] last committed token + proposals
    candidates: Tensor  # [bs, block - 1, K] the ids that each proposal was drawn from
    probs: Tensor  # [bs, block - 1, K] float32, their probabilities
    # [bs, block - 1] float32: of the draft's likeliest token at each position, whatever was drawn: they choose the
    # rows of a ragged step. None where nobody asked, or the draft cannot tell.
    logprobs: Tensor | None = None

    @classmethod
    def certain(cls, tokens: Tensor, ones: Tensor | None = None, logprobs: Tensor | None = None) -> Proposals:
        """Of a draft that always proposes `tokens[:, 1:]`. `ones` [bs, block - 1, 1] spares a launch per step."""
        candidates = tokens[:, 1:, None]
        if ones is None:
            ones = torch.ones_like(candidates, dtype=torch.float32)
        return cls(tokens, candidates, ones, logprobs)

    @classmethod
    def drawn(
        cls,
        tokens: Tensor,  # [bs, block], written: the proposals
        candidates: Tensor,  # [bs, block - 1, K], the likeliest first
        logits: Tensor,  # [bs, block - 1, K] float32
        temperatures: Tensor,  # [bs]
        greedy: Tensor,  # [bs] bool: requests that are to get the likeliest candidate
    ) -> Proposals:
        """Draws every proposal from the softmax of its candidates' logits at the request's temperature."""
        probs = (logits / temperatures[:, None, None]).softmax(dim=-1)
        likeliest = torch.zeros_like(probs)
        likeliest[..., 0] = 1
        probs = torch.where(greedy[:, None, None], likeliest, probs)
        index = draw(probs)[..., None]
        tokens[:, 1:] = candidates.gather(-1, index).squeeze(-1)
        return cls(tokens, candidates, probs)

    def copied(self) -> Proposals:
        """The same, where nobody else writes: `tokens`, and candidates that are its columns, may be a graph's
        input."""
        return self._replace(tokens=self.tokens.clone(), candidates=self.candidates.clone())


def draw(weights: Tensor) -> Tensor:
    """weights [..., n], not negative, some positive -> indices [...] int64, each in proportion to its weight."""
    return (weights / exponential_like(weights)).argmax(dim=-1)


def exponential_like(tensor: Tensor) -> Tensor:
    """Exponential noise of the shape and dtype of `tensor`, never zero: dividing weights by it before an argmax
    draws in proportion to them."""
    return torch.empty_like(tensor).exponential_().clamp_(min=torch.finfo(tensor.dtype).tiny)
