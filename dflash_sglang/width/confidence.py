"""What a step commits by how many rows it verifies: from the probabilities that the draft gives its proposals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_sglang.width.acceptance import PRIOR_ACCEPTANCE

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


class Confidence:
    """Proposals of a request by position and bin, and how often those of a bin come true.

    The draft is too sure or not sure enough, the same for long: a share of each bin is accepted, which is learnt
    from what was verified. What it says of a position is the batch's, a moving average over its steps.
    """

    def __init__(self, widths: Sequence[int]):
        """widths: ascending, the first one plain decoding."""
        self._widths = list(widths)
        positions = widths[-1] - 1
        usual = PRIOR_ACCEPTANCE ** np.arange(1.0, positions + 1)
        self._counts = np.eye(BINS)[_bins(usual)]  # [positions, BINS], of a request
        self._requests = np.full(positions, USUAL)  # that drafted a position
        self.observed = 0  # steps
        self._verified = np.zeros(BINS)
        self._accepted = np.zeros(BINS)

    @property
    def truth(self) -> np.ndarray:
        """[BINS] chance that a proposal of a bin is accepted, with all before it."""
        return (self._accepted + PRIOR * MIDDLES) / (self._verified + PRIOR)

    def observe(self, logprobs: np.ndarray, accepted: np.ndarray, lens: np.ndarray | None) -> None:
        """A verified step: logprobs [n, steps] of its proposals, how many were accepted [n], of how many tokens
        [n], or all."""
        n, steps = logprobs.shape
        if not n or not steps:
            return
        self.observed += 1
        bins = _bins(np.exp(logprobs.cumsum(axis=1)))
        position = np.arange(steps)
        counts = np.bincount((position * BINS + bins).ravel(), minlength=steps * BINS).reshape(steps, BINS) / n
        self._requests[:steps] = np.minimum(self._requests[:steps] + n, KEPT_STEPS * n)
        self._counts[:steps] += (counts - self._counts[:steps]) * (n / self._requests[:steps, None])
        tried = np.ones((n, steps), bool) if lens is None else position < lens[:, None] - 1
        verified = np.bincount(bins[tried], minlength=BINS)
        came_true = np.bincount(bins[tried & (position < accepted[:, None])], minlength=BINS)
        most = np.maximum(KEPT_PROPOSALS, KEPT_OF_STEP * verified)
        self._verified += verified
        self._accepted += came_true
        over = most / np.maximum(self._verified, most)
        self._verified *= over
        self._accepted *= over

    def share(self, width: int, rows: np.ndarray) -> np.ndarray:
        """Of the proposals that come true, the share [n] that is among so many rows [n], as in `committed`; the
        last of them are full blocks."""
        committed = self.committed(width, rows) - 1.0
        return committed / committed[-1]

    def committed(self, width: int, rows: np.ndarray) -> np.ndarray:
        """Tokens of a step of one request whose blocks have `widths[width]`, of which so many rows [...] of a
        request on average are verified, from 1 to that: the likeliest of the batch."""
        counts = self._counts[: self._widths[width] - 1].sum(axis=0)
        verified = np.concatenate([[1.0], 1.0 + counts.cumsum()])
        return np.interp(rows, verified, np.concatenate([[1.0], 1.0 + (counts * self.truth).cumsum()]))


def _bins(survival: np.ndarray) -> np.ndarray:
    """The bin of each chance."""
    return BINS - 1 - np.searchsorted(EDGES[::-1], survival, side="right")
