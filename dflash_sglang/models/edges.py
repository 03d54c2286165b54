"""What a draft has beside a head: edges between the candidates of one position and of the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from dflash_sglang.kernels.head.selector_walk import Codebooks, Draw, Lattice, selector_walk

CANDIDATES = 16
"""Of each step, where a checkpoint leaves them open: as many as published DFlash2 drafts choose from."""


class Edges(Protocol):
    """Scores a candidate of one step by the tokens chosen in the steps before.

    Steps are chosen one after the other. A draft without edges chooses each token by its row alone.
    """

    candidates: int  # of each step

    @property
    def projection(self) -> tuple[int, torch.dtype]:
        """Columns and dtype of what `project` gives."""

    def project(self, rows: Tensor) -> Tensor:
        """rows [bs * steps, hidden] -> [bs * steps, columns], what the edges to each step are scored with.
        Capturable in a CUDA graph."""

    def walk(
        self, lattice: Lattice, tokens: Tensor, logprobs: Tensor | None = None, draw: Draw | None = None
    ) -> Tensor | None:
        """As `kernels.head.selector_walk.selector_walk`, which writes to tokens and logprobs and returns the
        probabilities of drawn tokens; the lattice's hidden [bs, steps, columns] are projected rows. Capturable."""


class CodebookEdges(nn.Module):
    """Edges that are scored by codebooks: one launch walks through all steps. A subclass has `candidates`,
    `codebooks` and `project`."""

    @property
    def codebooks(self) -> Codebooks:
        raise NotImplementedError

    @property
    def projection(self) -> tuple[int, torch.dtype]:
        successor = self.codebooks.successor
        return successor.shape[1], successor.dtype

    def walk(
        self, lattice: Lattice, tokens: Tensor, logprobs: Tensor | None = None, draw: Draw | None = None
    ) -> Tensor | None:
        return selector_walk(self.codebooks, lattice, tokens, logprobs, draw)


Advance = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(step, projected row [bs, columns], the token before it [bs], state) -> (query [bs, rank], the next state)."""


def walk_with_state(
    successor: Tensor,
    advance: Advance,
    state: Tensor,
    lattice: Lattice,
    tokens: Tensor,
    logprobs: Tensor | None = None,
    draw: Draw | None = None,
) -> Tensor | None:
    """`Edges.walk` of edges whose scores depend on all tokens before, by a state that each of them advances.

    Step s scores candidate c

        logits[s, c] + query[s] . successor[candidates[s, c]]

    successor [vocab, rank]; state [bs, ...]: before the anchor. One launch per step beside those of `advance`.
    """
    bs, steps, _ = lattice.candidates.shape
    codebooks = Codebooks(None, successor)
    # Tensors of one step, contiguous: [steps, bs, 1, ...].
    candidates, logits = (_by_step(of) for of in lattice[:2])
    noise = None if draw is None else _by_step(draw.noise)
    sure = None if logprobs is None else logprobs.new_empty((steps, bs, 1))
    probs = []
    for step in range(steps):
        query, state = advance(step, lattice.hidden[:, step], tokens[:, step], state)
        of_step = Lattice(candidates[step], logits[step], query[:, None])
        logprob = None if sure is None else sure[step]
        drawn = None if draw is None or noise is None else draw._replace(noise=noise[step])
        probs.append(selector_walk(codebooks, of_step, tokens[:, step : step + 2], logprob, drawn))
    if logprobs is not None and sure is not None:
        logprobs.copy_(sure[..., 0].T)
    return None if draw is None else torch.cat([of for of in probs if of is not None], dim=1)


def _by_step(of_requests: Tensor) -> Tensor:
    """[bs, steps, K] -> [steps, bs, 1, K], contiguous"""
    return of_requests.transpose(0, 1).contiguous()[:, :, None]
