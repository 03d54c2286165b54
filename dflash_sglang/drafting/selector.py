"""Proposals of DFlash2's candidate selector: the likeliest walk in the draft's graph, drawn walks after it."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_sglang.drafting.proposals import Proposals, exponential_like
from dflash_sglang.kernels.head.selector_walk import Draw, Lattice
from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.models.selector import CandidateSelector


class SelectorProposals:
    """The `RowReader` of a DFlash2 draft.

    The graph ends with the candidates and the likeliest walk. A sampled request's walk is drawn from the same
    lattice, each step from the softmax over its candidates given the step before, so that the probabilities it
    keeps are those of a joint distribution of the block. Tensors live in buffers: a replay writes where a capture
    wrote.
    """

    ranks_may_part = True  # a walk follows from rows that every rank computed for itself

    def __init__(self, selector: CandidateSelector, head: TargetHead, max_requests: int, steps: int, drawn: bool):
        """steps: proposals of the widest blocks; drawn: whether `draw` will be asked for."""
        self._selector, self._head, self._drawn = selector, head, drawn
        base = selector.predecessor_codebook
        rows, width = max_requests * steps if drawn else 0, selector.spec.selector_top_k
        self._logprobs = torch.zeros(max_requests * steps, dtype=torch.float32, device=base.device)
        self._lattice = Lattice(
            torch.zeros((rows, width), dtype=torch.int64, device=base.device),
            torch.zeros((rows, width), dtype=torch.float32, device=base.device),
            torch.zeros((rows, base.shape[1]), dtype=base.dtype, device=base.device),
        )

    def write(self, rows: Tensor, tokens: Tensor) -> None:
        """rows after the anchor's -> the likeliest walk from `tokens[:, 0]`."""
        bs, steps, _ = rows.shape
        lattice = self._selector.lattice(self._head, rows)
        if self._drawn:
            for buffer, values in zip(self._lattice, lattice, strict=True):
                buffer[: bs * steps] = values.flatten(0, 1)
        self._selector.likeliest_walk(lattice, tokens, self._logprobs[: bs * steps].view(bs, steps))

    def write_nothing(self, rows: Tensor) -> None:
        """The collectives of `write` on no rows [0, hidden]."""
        self._head.likeliest(rows, self._selector.spec.selector_top_k)

    def read(self, bs: int, steps: int, padded: int) -> tuple[Tensor, None]:
        """The logprobs of the likeliest walk, whatever is drawn: each step's among its candidates, given the step
        before. A tree would need those of all edges."""
        return self._logprobs[: bs * steps].view(bs, steps), None

    def draw(self, tokens: Tensor, temperatures: Tensor, greedy: Tensor) -> Proposals:
        """Each step of a walk from the softmax of its candidates, given the step before."""
        bs, steps = len(tokens), tokens.shape[1] - 1
        lattice = Lattice(*(buffer[: bs * steps].view(bs, steps, -1) for buffer in self._lattice))
        draw = Draw(temperatures, greedy, exponential_like(lattice.logits))
        return Proposals(tokens, lattice.candidates, self._selector.drawn_walk(lattice, tokens, draw))
