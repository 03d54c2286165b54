"""Reads proposals off the draft's rows: the likeliest tokens or walk in the draft's graph, drawn ones after it."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dflash_sglang.checkpoint.family_specs import DRAWN_FROM
from dflash_sglang.drafting.proposals import Proposals, exponential_like
from dflash_sglang.kernels.head.pack_shard import Candidates
from dflash_sglang.kernels.head.selector_walk import Draw, Lattice
from dflash_sglang.models.edges import Edges
from dflash_sglang.models.head.target_head import TargetHead

TREE_CANDIDATES = 8  # of a position: what a tree of 32 nodes takes of one is hardly ever more


class RowReader:
    """Proposes with a head, and with edges between its candidates where the draft has them.

    The draft's graph ends with the head's likeliest tokens of each row, and with the likeliest walk through them.
    Without edges the head gives as many tokens as are drawn from, as a tree chooses from, or one. With edges the
    steps of a drawn walk follow each other, so that their probabilities are those of a joint distribution of the
    block. Tensors live in buffers: a replay writes where a capture wrote.
    """

    def __init__(
        self,
        head: TargetHead,
        edges: Edges | None,
        max_requests: int,
        steps: int,
        drawn: bool,
        device: str | torch.device,
        tree_requests: int = 0,
    ):
        """steps: proposals of the widest blocks; drawn: whether `draw` will be asked for; tree_requests: most
        requests, with the padding of a graph, whose widest blocks come with candidates for trees."""
        self._head, self._edges, self._drawn = head, edges, drawn
        self._widest, self._tree_requests = steps, tree_requests
        most = max(self._count(bs, steps) * bs * steps for bs in (tree_requests, max_requests))
        self._candidates = Candidates(
            torch.zeros(most, dtype=torch.int64, device=device),
            torch.zeros(most, dtype=torch.float32, device=device),
        )
        # Of the likeliest walk, and the third part of its lattice beside the candidates.
        self._logprobs = torch.zeros(0 if edges is None else max_requests * steps, device=device)
        self._views = lru_cache(64)(self._read)  # most steps are like the last
        self._hidden = torch.zeros(0)
        if edges is not None and drawn:
            columns, dtype = edges.projection
            self._hidden = torch.zeros((max_requests * steps, columns), dtype=dtype, device=device)

    @property
    def ranks_may_part(self) -> bool:
        """Whether ranks that compute the same rows may read different proposals off them. A head hands every rank
        of its group the same tokens; a walk follows from rows that every rank computed for itself."""
        return self._edges is not None

    @torch.no_grad()
    def write(self, rows: Tensor, tokens: Tensor) -> None:
        """Write the likeliest proposals of rows [bs, steps, hidden] to `tokens[:, 1:]`.

        tokens [bs, steps + 1] int64 begin with the last committed token. Capturable in a CUDA graph;
        collective over the head's group.
        """
        bs, steps, _ = rows.shape
        rows, candidates = rows.flatten(0, 1), self._written(bs, steps, padded=bs)
        self._head.likeliest(rows, candidates.ids.shape[-1], candidates)
        if self._edges is None:
            tokens[:, 1:] = candidates.ids[:, 0].view(bs, steps)
            return
        hidden = self._edges.project(rows)
        if self._drawn:
            self._hidden[: bs * steps] = hidden
        lattice = Lattice(*(of.view(bs, steps, -1) for of in (*candidates, hidden)))
        self._edges.walk(lattice, tokens, self._logprobs[: bs * steps].view(bs, steps))

    def write_nothing(self, rows: Tensor) -> None:
        """The collectives of `write` on no rows [0, hidden]."""
        self._head.likeliest(rows, self._count(0, 0))

    def read(self, bs: int, steps: int, padded: int) -> tuple[Tensor, Candidates | None]:
        """What `write` kept last, of the first bs of so many requests: logprobs [bs, steps] float32 of the
        likeliest proposals, whatever is drawn, and candidates for trees where `write` was asked for them.

        Logprobs are over the whole vocabulary; those of a walk are each step's among its candidates, given the
        step before. A tree of walks would need those of all edges: there are no candidates for it.
        """
        return self._views(bs, steps, padded)

    def _read(self, bs: int, steps: int, padded: int) -> tuple[Tensor, Candidates | None]:
        if self._edges is not None:
            return self._logprobs[: bs * steps].view(bs, steps), None
        candidates = Candidates(*(of.view(bs, steps, -1) for of in self._written(bs, steps, padded)))
        return candidates.logprobs[..., 0], candidates if self._for_trees(padded, steps) else None

    @torch.no_grad()
    def draw(self, tokens: Tensor, temperatures: Tensor, greedy: Tensor) -> Proposals:
        """Draw the blocks that `write` read last, over their likeliest proposals in tokens [bs, steps + 1]: each
        token from the softmax of its candidates' scores, given the step before where there are edges.

        temperatures [bs]; greedy [bs] bool: requests that keep their likeliest proposals. Collective where walks
        embed tokens (`DominoEdges`).
        """
        bs, steps = len(tokens), tokens.shape[1] - 1
        ids, logprobs = (of.view(bs, steps, -1) for of in self._written(bs, steps, padded=bs))
        if self._edges is None:
            return Proposals.drawn(tokens, ids, logprobs, temperatures, greedy)
        lattice = Lattice(ids, logprobs, self._hidden[: bs * steps].view(bs, steps, -1))
        draw = Draw(temperatures, greedy, exponential_like(logprobs))
        probs = self._edges.walk(lattice, tokens, draw=draw)
        assert probs is not None
        return Proposals(tokens, ids, probs)

    def _written(self, bs: int, steps: int, padded: int) -> Candidates:
        """Where `write` puts the candidates [bs * steps, K] of the first bs of so many requests."""
        count = self._count(padded, steps)
        return Candidates(*(of[: bs * steps * count].view(-1, count) for of in self._candidates))

    def _count(self, padded: int, steps: int) -> int:
        if self._edges is not None:
            return self._edges.candidates
        if self._drawn:
            return DRAWN_FROM
        return TREE_CANDIDATES if self._for_trees(padded, steps) else 1

    def _for_trees(self, padded: int, steps: int) -> bool:
        return steps == self._widest and padded <= self._tree_requests
