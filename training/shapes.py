"""The reference of decoding with chains, ragged chains and best-first trees, in plain PyTorch and float32.

A step verifies a *tree* of rows for each request. Node 0 is the root, the request's last token. A chain is a tree
with one candidate per position. The loop takes what it decodes through `Request`, so that a toy model can stand in
for the pair.

Sampled requests sample and walk. The target's token is drawn at every node, and the walk goes from the root to the
child that has the drawn token. Draws do not decide which rows are verified, so that the output is distributed as
plain decoding's, whatever the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from training.reference import ReferenceDraft, Target

Draw = Callable[[Tensor, Sequence[int]], list[int]]
"""Logits [N, vocab] and the positions of the tokens to draw -> N tokens."""


class Tree(NamedTuple):
    """Of every node: its parent (-1 of the root), its token's rank among the candidates of its position, its depth
    (0 of the root), and the logarithm of the chance that it and all its ancestors are accepted."""

    parents: list[int]
    ranks: list[int]
    depths: list[int]
    masses: list[Any]

    def first(self, nodes: int) -> Tree:
        return Tree(*(of[:nodes] for of in self))


class Marginals(NamedTuple):
    """What the draft proposes: [positions, K], likeliest first."""

    logp: np.ndarray
    tokens: np.ndarray


class Shape(NamedTuple):
    """What a step verifies: `rows` of a request (root included), out of `candidates` tokens at each position.

    One candidate gives chains. `shared`: `rows` is a mean, and the likeliest rows of the batch are verified.
    """

    rows: int
    candidates: int = 1
    shared: bool = False


class Step(NamedTuple):
    """One request's part of a step: its tree, the token of every node, the accepted nodes from the root on."""

    tree: Tree
    tokens: list[int]
    path: list[int]


@dataclass
class Decoded:
    """ids: the generated tokens, not cut, so that the last step may go beyond the wanted number; its steps."""

    ids: list[int]
    steps: list[Step] = field(default_factory=list)

    @property
    def accept_lengths(self) -> list[int]:
        return [len(step.path) for step in self.steps]


def grow(logp: np.ndarray, nodes: int) -> Tree:
    """The best-first tree of at most `nodes` nodes; the first n nodes of it are the tree of n nodes.

    logp [positions, K]: log-probabilities of the candidates of each position, descending and not above 0. Masses
    are summed from the root on in the type of logp. Of equal masses the shallower node comes first, then the lower
    rank, then the earlier parent. The tree is smaller than `nodes` only where no candidate is left.
    """
    positions, candidates = logp.shape
    tree = Tree([-1], [0], [0], [logp.dtype.type(0)])
    frontier: list[tuple[Any, int, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        depth = tree.depths[parent]
        if depth < positions and rank < candidates:
            heapq.heappush(frontier, (-(tree.masses[parent] + logp[depth, rank]), depth + 1, rank, parent))

    # The rest of a node's siblings and of its children is not likelier: the next of each are enough to look at.
    offer(0, 0)
    while frontier and len(tree.parents) < nodes:
        negated, depth, rank, parent = heapq.heappop(frontier)
        for of, value in zip(tree, (parent, rank, depth, -negated), strict=True):
            of.append(value)
        offer(parent, rank + 1)
        offer(len(tree.parents) - 1, 0)
    return tree


def share(masses: Sequence[Sequence[Any]], rows: int) -> list[int]:
    """Rows of each request, so that they are `rows` together: every root, and the likeliest other nodes.

    masses: of every request's nodes, root first, descending. Of equal ones those of the first requests are taken.
    Raises ValueError if the requests have more roots or fewer nodes than `rows`.
    """
    sizes = [len(of) for of in masses]
    if not len(sizes) <= rows <= sum(sizes):
        raise ValueError(f"rows={rows}: expected {len(sizes)}..{sum(sizes)}, one to all nodes of every request")
    owners = np.repeat(np.arange(len(sizes)), [size - 1 for size in sizes])
    order = np.argsort(-np.concatenate([of[1:] for of in masses]), kind="stable")[: rows - len(sizes)]
    return (1 + np.bincount(owners[order], minlength=len(sizes))).tolist()


def tokens_of(tree: Tree, root: int, candidates: np.ndarray) -> list[int]:
    """The token of every node. root: the last token; candidates [positions, K]."""
    return [root] + [int(candidates[d - 1, r]) for d, r in zip(tree.depths[1:], tree.ranks[1:], strict=True)]


def walk(parents: Sequence[int], tokens: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The accepted nodes, from the root on. drawn: the target's token after every node. Committed are the drawn
    tokens of these nodes. Parents come before their children, and siblings differ."""
    path = [0]
    for node in range(1, len(parents)):
        if parents[node] == path[-1] and tokens[node] == drawn[path[-1]]:
            path.append(node)
    return path


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """[N, N] bool: whether the column's node is the row's node or above it."""
    above = np.eye(len(parents), dtype=bool)
    for node in range(1, len(parents)):
        above[node] |= above[parents[node]]
    return above


def greedy(logits: Tensor, positions: Sequence[int]) -> list[int]:
    return logits.argmax(-1).tolist()


def seeded(temperature: float, noise: Tensor) -> Draw:
    """Draws from softmax(logits / temperature). noise [positions, vocab]: standard Gumbel, so that a token follows
    from its position and its logits, and plain decoding with the same noise commits the same tokens."""

    def draw(logits: Tensor, positions: Sequence[int]) -> list[int]:
        return (logits / temperature + noise[list(positions)]).argmax(-1).tolist()

    return draw


def gumbel(positions: int, vocab: int, seed: int) -> Tensor:
    """[positions, vocab] of standard Gumbel noise."""
    generator = torch.Generator().manual_seed(seed)
    return -torch.empty(positions, vocab).exponential_(generator=generator).log()


def likeliest(logits: Tensor, candidates: int) -> Marginals:
    """logits [positions, vocab]; of equal ones the lower token comes first."""
    logp, tokens = logits.float().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return Marginals(logp[..., :candidates].numpy(), tokens[..., :candidates].numpy())


class Request(Protocol):
    """A request of `decode`. `position`: that of its last token."""

    position: int

    def first(self) -> Tensor:
        """Logits [1, vocab] after the prompt. `position` becomes that of the token drawn from them."""

    def propose(self, last: int, candidates: int) -> Marginals:
        """What may follow the last token."""

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits [N, vocab] after every node, each under its ancestors only."""

    def accept(self, path: Sequence[int]) -> None:
        """Keeps these nodes of the rows verified last, and forgets the others."""


def decode(requests: Sequence[Request], shape: Shape, new_tokens: int, draws: Sequence[Draw]) -> list[Decoded]:
    """Decodes the requests as one batch, a step of each at a time, until each has `new_tokens` tokens."""
    out = []
    for request, draw in zip(requests, draws, strict=True):
        logits = request.first()
        out.append(Decoded(draw(logits, [request.position])))
    while live := [at for at, decoded in enumerate(out) if len(decoded.ids) < new_tokens]:
        marginals = [requests[at].propose(out[at].ids[-1], shape.candidates) for at in live]
        budget = shape.rows * len(live)
        most = budget if shape.shared else shape.rows
        trees = [grow(of.logp, most) for of in marginals]
        if shape.shared:
            masses = [tree.masses for tree in trees]
            counts = share(masses, min(budget, sum(map(len, masses))))
            trees = [tree.first(count) for tree, count in zip(trees, counts, strict=True)]
        for at, of, tree in zip(live, marginals, trees, strict=True):
            request, decoded = requests[at], out[at]
            tokens = tokens_of(tree, decoded.ids[-1], of.tokens)
            logits = request.verify(tokens, tree.parents)
            drawn = draws[at](logits, [request.position + depth + 1 for depth in tree.depths])
            path = walk(tree.parents, tokens, drawn)
            request.accept(path)
            decoded.ids += [drawn[node] for node in path]
            decoded.steps.append(Step(tree, tokens, path))
    return out


class PairRequest:
    """A prompt under a target of `transformers` and its draft, both in float32."""

    def __init__(self, target: Any, draft: ReferenceDraft, prompt: Sequence[int]) -> None:
        self._target, self._draft, self._prompt = target, draft, list(prompt)
        self._runner = Target(target, draft.shape.target_layer_ids)
        self.position = len(prompt)
        self._features: Tensor = torch.empty(0)

    def first(self) -> Tensor:
        logits, features = self._runner.rows(self._prompt, 0)
        self._context = self._draft.context_kv(features, torch.arange(len(self._prompt)))
        return logits[-1:]

    @torch.no_grad()
    def propose(self, last: int, candidates: int) -> Marginals:
        size, mask = self._draft.shape.block_size, self._draft.shape.mask_token_id
        embeds = self._target.get_input_embeddings()(torch.tensor([last] + [mask] * (size - 1)))
        positions = torch.arange(self.position, self.position + size)
        hidden = self._draft.block(embeds, positions, self._context)
        return likeliest(self._target.get_output_embeddings()(hidden[1:]), candidates)

    def verify(self, tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        logits, self._features = self._runner.rows(tokens, self.position, ancestors(parents))
        return logits

    def accept(self, path: Sequence[int]) -> None:
        self._runner.keep(self.position, path)
        positions = torch.arange(self.position, self.position + len(path))
        new = self._draft.context_kv(self._features[list(path)], positions)
        self._context = [
            (torch.cat((k, more_k)), torch.cat((v, more_v)))
            for (k, v), (more_k, more_v) in zip(self._context, new, strict=True)
        ]
        self.position += len(path)
