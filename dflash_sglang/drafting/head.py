"""Proposals of a plain draft: the head's likeliest token of every row, or tokens drawn from its likeliest ones."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_sglang.checkpoint.vocabulary import DRAWN_FROM
from dflash_sglang.drafting.proposals import Proposals
from dflash_sglang.kernels.head.pack_shard import Candidates
from dflash_sglang.models.head.target_head import TargetHead

TREE_CANDIDATES = 8  # of a position: what a tree of 32 nodes takes of one is hardly ever more


class HeadProposals:
    """The `RowReader` of a plain draft.

    The graph ends with the head's likeliest tokens of each row: as many as are drawn from, as a tree chooses from,
    or one. They live in buffers: a replay writes where a capture wrote.
    """

    ranks_may_part = False  # the head hands every rank of its group the same tokens

    def __init__(
        self, head: TargetHead, max_requests: int, steps: int, drawn: bool, device: str, tree_requests: int = 0
    ):
        """steps: proposals of the widest blocks; drawn: whether `draw` will be asked for; tree_requests: most
        requests, with the padding of a graph, whose widest blocks come with candidates for trees."""
        self._head, self._drawn = head, drawn
        self._widest, self._tree_requests = steps, tree_requests
        most = max(self._count(bs, steps) * bs * steps for bs in (tree_requests, max_requests))
        self._candidates = Candidates(
            torch.zeros(most, dtype=torch.int64, device=device),
            torch.zeros(most, dtype=torch.float32, device=device),
        )

    def write(self, rows: Tensor, tokens: Tensor) -> None:
        """rows after the anchor's -> the head's likeliest tokens."""
        bs, steps, _ = rows.shape
        candidates = self._written(bs, steps, padded=bs)
        self._head.likeliest(rows.flatten(0, 1), candidates.ids.shape[-1], candidates)
        tokens[:, 1:] = candidates.ids[:, 0].view(bs, steps)

    def write_nothing(self, rows: Tensor) -> None:
        """The collectives of `write` on no rows [0, hidden]."""
        self._head.likeliest(rows, self._count(0, 0))

    def read(self, bs: int, steps: int, padded: int) -> tuple[Tensor, Candidates | None]:
        """Logprobs over the whole vocabulary; candidates for trees where `write` was asked for them."""
        candidates = Candidates(*(of.view(bs, steps, -1) for of in self._written(bs, steps, padded)))
        return candidates.logprobs[..., 0], candidates if self._for_trees(padded, steps) else None

    def draw(self, tokens: Tensor, temperatures: Tensor, greedy: Tensor) -> Proposals:
        """Each token from the softmax of its candidates."""
        bs, steps = len(tokens), tokens.shape[1] - 1
        ids, logprobs = (of.view(bs, steps, -1) for of in self._written(bs, steps, padded=bs))
        return Proposals.drawn(tokens, ids, logprobs, temperatures, greedy)

    def _written(self, bs: int, steps: int, padded: int) -> Candidates:
        """Where `write` puts the candidates [bs * steps, K] of the first bs of so many requests."""
        count = self._count(padded, steps)
        return Candidates(*(of[: bs * steps * count].view(-1, count) for of in self._candidates))

    def _count(self, padded: int, steps: int) -> int:
        if self._drawn:
            return DRAWN_FROM
        return TREE_CANDIDATES if self._for_trees(padded, steps) else 1

    def _for_trees(self, padded: int, steps: int) -> bool:
        return steps == self._widest and padded <= self._tree_requests
