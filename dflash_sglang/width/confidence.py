"""What steps of any shape accept: from the probabilities that the draft gives its proposals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dflash_sglang.width.requests import PRIOR_ACCEPTANCE

# Of the chance that a proposal and all before it are accepted, by the draft's own probabilities: one bin between
# two of these, the likeliest first. Rows are verified in this order, so that finer ones would change little.
EDGES = np.array([0.99, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02])
BINS = len(EDGES) + 1
MIDDLES = np.array([*(EDGES + np.array([1.0, *EDGES[:-1]])) / 2, 0.01])
KEPT_STEPS = 32.0  # steps after which what a batch drafted weighs 1/e
USUAL = 16.0  # requests that what is usual is worth
KEPT_PROPOSALS = 4096.0  # verified proposals of a bin, or
KEPT_OF_STEP = 8.0  # as many steps' of it, if those are more
PRIOR = 16.0  # proposals that a bin's own probability is worth
# Of trees. On a trained pair the masses of nodes add up to more, against those of the chain, than is accepted: the
# continuation of a token that is not the likeliest is right less often.
USUAL_TREES = {16: 1.15, 32: 1.26, 64: 1.36}  # proposals accepted of a tree over those of the block's chain
USUAL_OF_MASS = 0.95  # of what the masses promise, what is accepted
TREE_PRIOR, TREE_KEPT = 1024.0, 8192.0  # proposals that it is worth, and that are remembered
GROWN_PRIOR, GROWN_KEPT = 128.0, 2048.0  # the same of the masses themselves, of which each step tells all


class Confidence:
    """Proposals of a request by position and bin, and how often those of a bin come true.

    The draft is too sure or not sure enough, the same for long: a share of each bin is accepted, which is learnt
    from what was verified. What it says of a position is the batch's, a moving average over its steps.

    Of a tree its masses are compared with those of the chain of the same step. Trees are nested, so a step tells
    of every tree up to its own.
    """

    def __init__(self, block: int, trees: Iterable[int] = ()):
        """block: width of the widest chain. trees: nodes of those that are served."""
        usual = PRIOR_ACCEPTANCE ** np.arange(1.0, block)
        self._counts = np.eye(BINS)[_bins(usual)]  # [positions, BINS], of a request
        self._requests = np.full(block - 1, USUAL)  # that drafted a position
        self.observed = 0  # steps
        self._kept = np.zeros((2, BINS))  # proposals verified, and accepted; the older ones fade
        # Since start-up: proposals verified, accepted as the draft says, and really.
        self.told = np.zeros((3, BINS))
        self._grown = {
            nodes: GROWN_PRIOR * np.array([USUAL_TREES.get(nodes, 1.0) / USUAL_OF_MASS, 1.0]) for nodes in trees
        }
        self._of_trees = TREE_PRIOR * np.array([USUAL_OF_MASS, 1.0])  # accepted, promised by mass

    @property
    def truth(self) -> np.ndarray:
        """[BINS] chance that a proposal of a bin is accepted, with all before it."""
        verified, accepted = self._kept
        return (accepted + PRIOR * MIDDLES) / (verified + PRIOR)

    def observe(self, logprobs: np.ndarray, accepted: np.ndarray, lens: np.ndarray | None) -> np.ndarray:
        """Verified steps of chains, k of n requests: logprobs [k, n, steps] of their proposals, how many were
        accepted [k, n], of how many tokens [k, n], or all. Returns the chance [k, n, steps] of each, with all
        before it."""
        said = np.exp(logprobs.cumsum(axis=-1))
        bins = self._drafted(said)
        position = np.arange(said.shape[-1])
        allowed = said > 0.0
        tried = allowed if lens is None else allowed & (position < lens[..., None] - 1)
        came_true = tried & (position < accepted[..., None])
        flat = bins.ravel()
        told = np.array([np.bincount(flat, of.ravel(), BINS) for of in (tried, said * tried, came_true)])
        self.told += told
        most = np.maximum(KEPT_PROPOSALS, KEPT_OF_STEP * told[0] / len(said))
        self._kept += told[::2]
        self._kept *= most / np.maximum(self._kept[0], most)
        return self.truth[bins] * allowed

    def observe_trees(self, logprobs: np.ndarray, mass: np.ndarray, accepted: np.ndarray) -> np.ndarray:
        """Verified steps of trees, k of n requests: logprobs [k, n, steps] of the likeliest tokens, mass
        [k, n, nodes] of each node the log-probability with those above it, the root's first, and how many were
        accepted [k, n]. Returns what `observe` does, of the chain."""
        said = np.exp(logprobs.cumsum(axis=-1))
        chances = self.truth[self._drafted(said)]
        chain, grown = said.sum(), np.exp(mass[..., 1:]).cumsum(axis=-1).sum(axis=(0, 1))
        for nodes, sums in self._grown.items():
            if nodes <= mass.shape[-1]:
                _remember(sums, np.array([grown[nodes - 2], chain]), GROWN_KEPT, len(said))
        promised = chances.sum() * grown[-1] / max(chain, 1e-9)
        _remember(self._of_trees, np.array([accepted.sum(), promised]), TREE_KEPT, len(said))
        return chances

    def _drafted(self, said: np.ndarray) -> np.ndarray:
        """Counts chances [k, n, steps] by position. Returns the bin of each."""
        k, n, steps = said.shape
        self.observed += k
        bins = _bins(said)
        places = (np.arange(steps) * BINS + bins).ravel()
        counts = np.bincount(places, minlength=steps * BINS).reshape(steps, BINS) / (k * n)
        self._requests[:steps] = np.minimum(self._requests[:steps] + k * n, KEPT_STEPS * n)
        self._counts[:steps] += (counts - self._counts[:steps]) * (k * n / self._requests[:steps, None])
        return bins

    def shares(self, widths: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of the proposals that a chain of each width accepts, the share that is among the likeliest rows of the
        batch, as points of a line: rows of a request on average, the first included, and the share."""
        counts = self._counts.cumsum(axis=0)[[width - 2 for width in widths]]
        verified, accepted = np.ones((len(widths), BINS + 1)), np.zeros((len(widths), BINS + 1))
        verified[:, 1:] += counts.cumsum(axis=1)
        (counts * self.truth).cumsum(axis=1, out=accepted[:, 1:])
        return list(zip(verified, accepted / accepted[:, -1:], strict=True))

    def of_tree(self, nodes: int) -> float:
        """Proposals that trees of so many nodes accept, over those of the block's chain."""
        (grown, chain), (accepted, promised) = self._grown[nodes], self._of_trees
        return float(grown / chain * accepted / promised)

    def snapshot(self) -> dict[str, Any]:
        """Since start-up, by bin of the draft's own chance: proposals verified, and how many were accepted by that
        chance, and really."""
        least = [*EDGES.tolist(), 0.0]
        verified, expected, accepted = self.told.tolist()
        return {"from": least, "verified": verified, "expected": expected, "accepted": accepted}


def _remember(sums: np.ndarray, more: np.ndarray, kept: float, steps: int) -> None:
    """sums [2]: the last one is what is remembered, up to `kept` or eight times what each of the steps adds."""
    sums += more
    most = max(kept, KEPT_OF_STEP * float(more[-1]) / steps)
    sums *= min(most / float(sums[-1]), 1.0)


def _bins(chances: np.ndarray) -> np.ndarray:
    """The bin of each chance."""
    return BINS - 1 - np.searchsorted(EDGES[::-1], chances, side="right")
