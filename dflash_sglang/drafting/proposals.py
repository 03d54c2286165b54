"""Proposals of a step, certain (the draft's argmax) or drawn from its own distribution, and their source."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from dflash_sglang.kernels.head.pack_shard import Candidates

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from dflash_sglang.drafting.block import Block


class Proposals(NamedTuple):
    """What the draft proposes, and what else it could have proposed."""

    tokens: Tensor  # [bs, block] last committed token + proposals
    candidates: Tensor  # [bs, block - 1, K] the ids that each proposal was drawn from
    probs: Tensor  # [bs, block - 1, K] float32, their probabilities
    # [bs, block - 1] float32: of the draft's likeliest token at each position, or of each step of its likeliest
    # walk, whatever was drawn: they choose the rows of a ragged step. None where no draft proposed.
    logprobs: Tensor | None = None
    # [bs, block - 1, K], of the likeliest tokens of each position, which trees are grown from. Where given, the
    # first are the certain proposals. In buffers that the next step writes.
    best: Candidates | None = None
    # [bs] float32: the chance that a token of a copy is right, where one replaces the draft's proposals; else 0.
    # In a buffer that the next step writes. None where a launch copies nothing.
    promised: Tensor | None = None

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
        logits: Tensor,  # [bs, block - 1, K] float32; what is added to all of a position changes nothing
        temperatures: Tensor,  # [bs]
        greedy: Tensor,  # [bs] bool: requests that are to get the likeliest candidate
        noise: Tensor | None = None,  # as `exponential_like` makes of the logits; None: it does so here
    ) -> Proposals:
        """Draws every proposal from the softmax of its candidates' logits at the request's temperature."""
        probs = (logits / temperatures[:, None, None]).softmax(dim=-1)
        likeliest = torch.zeros_like(probs)
        likeliest[..., 0] = 1
        probs = torch.where(greedy[:, None, None], likeliest, probs)
        index = draw(probs, noise)[..., None]
        tokens[:, 1:] = candidates.gather(-1, index).squeeze(-1)
        return cls(tokens, candidates, probs)

    def copied(self) -> Proposals:
        """The same, where nobody else writes: `tokens`, and candidates that are its columns, may be a graph's
        input."""
        return self._replace(tokens=self.tokens.clone(), candidates=self.candidates.clone())


def draw(weights: Tensor, noise: Tensor | None = None) -> Tensor:
    """weights [..., n], not negative, some positive -> indices [...] int64, each in proportion to its weight.
    noise: what `exponential_like` makes of weights, if it is there already."""
    return (weights / (exponential_like(weights) if noise is None else noise)).argmax(dim=-1)


def exponential_like(tensor: Tensor) -> Tensor:
    """Exponential noise of the shape and dtype of `tensor`, never zero: dividing weights by it before an argmax
    draws in proportion to them."""
    return torch.empty_like(tensor).exponential_().clamp_(min=torch.finfo(tensor.dtype).tiny)


class ProposalSource(Protocol):
    """Proposes the tokens of a block that follow its first one.

    What a source keeps of the rows that the target has verified is its `ContextWriter`
    (`models.context_kv.base`). DFlash keeps keys and values.
    """

    def draft_rows(self, width: int) -> int:
        """Rows of one request in the draft's forward, for a block of `width` tokens. 0: no forward."""

    def propose(self, batch: ScheduleBatch, block: Block) -> Proposals:
        """Propose for every request of the batch, with logprobs if blocks have proposals. They may be drawn for
        sampled requests without seeds."""

    def propose_idle(self, batch: ScheduleBatch, width: int) -> None:
        """Take part in the collectives of `propose` on a rank without requests, whose neighbours draft blocks of
        `width`."""

    def examples(self, width: int) -> list[Proposals]:
        """One request's proposals of each kind that steps of this width get, to compile what reads them."""


class Changed:
    """A `ProposalSource` whose proposals `change` writes over in place, and returns."""

    def __init__(
        self, source: ProposalSource, change: Callable[[ScheduleBatch, Block, Proposals], Proposals]
    ) -> None:
        self._source, self._change = source, change
        self.draft_rows, self.propose_idle, self.examples = source.draft_rows, source.propose_idle, source.examples

    def propose(self, batch: ScheduleBatch, block: Block) -> Proposals:
        return self._change(batch, block, self._source.propose(batch, block))
