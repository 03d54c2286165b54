"""How many proposals the target accepts, with confidence intervals.

A request is the sampling unit, since the steps of one request resemble each other: intervals are percentiles of
resampled requests (a bootstrap, seeded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Acceptance:
    """Of all requests together, and of each."""

    length: Estimate  # tokens committed in a verify step, the bonus token included
    positions: tuple[Estimate, ...]  # share of the steps that accepted proposal 1, 2, ...
    steps: int
    per_request: tuple[float | None, ...]  # accept length of each, None without a verify step


def acceptance(histograms: Sequence[Sequence[int]], block: int) -> Acceptance:
    """``histograms``: for each request, how many of its verify steps accepted 0, 1, 2, ... proposals.

    Raises ValueError without any verify step, or where a step accepted a whole block of proposals.
    """
    counts = np.zeros((len(histograms), block))
    for row, histogram in zip(counts, histograms, strict=True):
        if len(histogram) > block:
            raise ValueError(f"{len(histogram) - 1} accepted proposals: expected at most {block - 1} in a block")
        row[: len(histogram)] = histogram
    steps = counts.sum(1)
    if not steps.any():
        raise ValueError("no request had a verify step")
    drawn = np.random.default_rng(0).integers(0, len(counts), (RESAMPLES, len(counts)))
    resampled = np.stack([counts[rows].sum(0) for rows in drawn])
    resampled = resampled[resampled.any(1)]  # a resample may hold only requests without a step
    values = _figures(counts.sum(0, keepdims=True))[0]
    low, high = np.quantile(_figures(resampled), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    length, *positions = (Estimate(*map(float, figures)) for figures in zip(values, low, high, strict=True))
    lengths = [float(1 + row @ np.arange(block) / row.sum()) if row.any() else None for row in counts]
    return Acceptance(length, tuple(positions), int(steps.sum()), tuple(lengths))


def _figures(counts: np.ndarray) -> np.ndarray:
    """[n, block] counts of steps by accepted proposals -> [n, block]: accept length, then the share of steps that
    accepted proposal 1, 2, ..."""
    at_least = counts[:, ::-1].cumsum(1)[:, ::-1]
    shares = at_least[:, 1:] / at_least[:, :1]
    return np.concatenate([1 + shares.sum(1, keepdims=True), shares], axis=1)
