"""How long a step takes: a table over padded batch and width, measured at start-up and corrected while serving."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

# Chosen in the simulation (docs/results/width-simulated.md).
MEASURED, FILLED = 2 / 3, 2.0  # variance of a cell, over that of an observation: measured at start-up, or not
DRIFT = 1 / 240  # that it grows by with each step, up to that of a cell that nobody measured
TO_WIDTH, TO_CELL = 0.3, 0.4  # of an error, the parts that go to the factor of its width and of its cell
PACE_STEPS = 5  # the latest ones, of which one or two may be outliers
SPACING = 4  # from one batch size that start-up measures to the next
LEAST_LIMIT = 0.1  # an error counts at most this much, or as much as the gain: pauses hardly move a table


class Sample(NamedTuple):
    """A step that start-up measured."""

    batch: int
    width: int
    context_tokens: int  # of the whole batch
    seconds: float


class StepTimes:
    """Seconds of a step for every captured batch size and width.

    A step costs `base[bucket, width] + slope[width] * context_tokens`, with `context_tokens` the sum over the
    batch. `fit` takes what start-up measures and fills what it did not. Along the batch sizes that is piecewise
    linear, which keeps what is monotone monotone; beyond the largest measured one it follows the last slope,
    because a step is bound by its tokens there. Widths that were not measured follow their neighbours.

    `observe` corrects the table by three kinds of factors.

    - The pace of the machine, one factor of the whole table: the median of the latest steps. A machine that is
      slower than at start-up, for long or for a few steps, changes no ratio between widths.
    - A factor per width: a width that is slower than measured is so at batch sizes that were not seen yet.
    - A factor per cell, with a Kalman gain. The variance of a cell grows with its age, so a few probes correct
      what start-up or a slow spell left wrong.
    """

    def __init__(self, buckets: Sequence[int], widths: Sequence[int]):
        """`buckets`: the captured batch sizes; `widths`: those to choose from. Both ascending."""
        self.buckets, self.widths = list(buckets), list(widths)
        self._pace = 1.0
        self._latest: deque[float] = deque(maxlen=PACE_STEPS)  # times over those of the table without the pace
        self._by_width = [1.0] * len(self.widths)
        self._by_cell = [[1.0] * len(self.widths) for _ in self.buckets]
        self._variance = [[FILLED] * len(self.widths) for _ in self.buckets]
        self._observed = 0  # steps
        self._last_observed = [[0] * len(self.widths) for _ in self.buckets]
        self._base: list[list[float]] = []
        self._slope = [0.0] * len(self.widths)

    def bucket(self, batch: int) -> int:
        """Index of the captured batch size that a batch is padded to. Raises ValueError beyond the largest."""
        index = bisect.bisect_left(self.buckets, batch)
        if index == len(self.buckets):
            raise ValueError(f"batch={batch}: expected at most {self.buckets[-1]}, the largest of the step times.")
        return index

    # ---- Start-up ----------------------------------------------------------------------------------------

    def fit(self, samples: Iterable[Sample]) -> None:
        """Builds the table. The shortest time of equal steps counts: what else runs on the machine only adds.

        Raises ValueError without samples."""
        shortest: dict[tuple[int, int], dict[int, float]] = {}  # by cell and context
        for batch, width, context, seconds in samples:
            of_cell = shortest.setdefault((self.bucket(batch), self.widths.index(width)), {})
            of_cell[context] = min(seconds, of_cell.get(context, seconds))
        if not shortest:
            raise ValueError("no step time was measured: expected at least one cell of `startup_cells`.")
        measured = {cell: list(of_cell.items()) for cell, of_cell in shortest.items()}
        lines = [
            [line for cell, line in measured.items() if cell[1] == width] for width in range(len(self.widths))
        ]
        usual = _slope([line for of_width in lines for line in of_width]) or 0.0
        slopes = [_slope(of_width) for of_width in lines]
        # Every width reads the same context: what differs between them is half noise.
        self._slope = [usual if slope is None else (slope + usual) / 2 for slope in slopes]
        base = np.full((len(self.buckets), len(self.widths)), np.nan)
        for (bucket, width), line in measured.items():
            rest = [max(seconds - self._slope[width] * context, 0.1 * seconds) for context, seconds in line]
            base[bucket, width] = sum(rest) / len(rest)
            self._variance[bucket][width] = MEASURED
        self._base = filled(base, np.array(self.buckets, float), np.array(self.widths, float)).tolist()

    # ---- Serving -----------------------------------------------------------------------------------------

    def seconds(self, bucket: int, context_tokens: float) -> list[float]:
        """Expected seconds of a step of every width."""
        return [self.of_width(bucket, width, context_tokens) for width in range(len(self.widths))]

    def of_width(self, bucket: int, width: int, context_tokens: float) -> float:
        """Expected seconds of a step of one width, given as an index."""
        of_table = self._base[bucket][width] + self._slope[width] * context_tokens
        return of_table * self._by_width[width] * self._by_cell[bucket][width] * self._pace

    def observe(self, bucket: int, width: int, context_tokens: float, seconds: float) -> float:
        """Learn from a step that was served, its width given as an index.

        Returns its error: what it took beyond what was expected, relative to that, as far as it counts."""
        if not seconds > 0:
            return 0.0
        ratio = seconds / self.of_width(bucket, width, context_tokens)
        self._observed += 1
        age = self._observed - self._last_observed[bucket][width]
        variance = min(self._variance[bucket][width] + DRIFT * age, FILLED)
        gain = variance / (variance + 1.0)  # Kalman's, and the variance afterwards
        self._variance[bucket][width], self._last_observed[bucket][width] = gain, self._observed
        limit = max(LEAST_LIMIT, gain)
        error = min(max(ratio - 1.0, -limit), limit)
        self._by_width[width] *= 1.0 + TO_WIDTH * gain * error
        self._by_cell[bucket][width] *= 1.0 + TO_CELL * gain * error
        self._latest.append(ratio * self._pace)
        if len(self._latest) == PACE_STEPS:
            self._pace = statistics.median(self._latest)
        return error


def startup_cells(
    buckets: Sequence[int], widths: Sequence[int], *, max_tokens: int = 8192, long_context: int = 4096
) -> list[tuple[int, int, int]]:
    """The (batch, width, context tokens of the batch) that are worth measuring at start-up.

    Batch sizes a factor of `SPACING` apart and the largest; of those no cell of more than `max_tokens` verified
    tokens (two batch sizes of each width are kept), beyond which time grows with tokens. One batch size of at
    most 16 is measured at `long_context` tokens per request as well, for the cost of context.
    """
    batches = [buckets[0]]
    for bucket in buckets:
        if bucket >= SPACING * batches[-1] or (bucket == buckets[-1] and bucket > batches[-1]):
            batches.append(bucket)
    cells = [
        (batch, width, 0)
        for index, batch in enumerate(batches)
        for width in widths
        if batch * width <= max_tokens or index < 2
    ]
    middle = max(batch for batch in batches if batch <= max(16, buckets[0]))
    return cells + [(middle, width, middle * long_context) for width in widths]


def _slope(lines: list[list[tuple[int, float]]]) -> float | None:
    """Seconds per context token from cells that are (context, seconds) each, None if none has two contexts."""
    above = below = 0.0
    for line in lines:
        context, seconds = (np.array(values) for values in zip(*line, strict=True))
        context = context - context.mean()
        above += float(context @ seconds)
        below += float(context @ context)
    return max(above / below, 0.0) if below > 0 else None


def filled(base: np.ndarray, buckets: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """base [buckets, widths], its NaN (what nothing was measured of) filled."""
    out = base.copy()
    whole = [width for width in range(len(widths)) if np.isfinite(base[:, width]).sum() >= 2]
    if not whole:  # at most one batch size per width: taken for all batch sizes
        whole = [width for width in range(len(widths)) if np.isfinite(base[:, width]).any()]
    for width in whole:
        seen = np.isfinite(base[:, width])
        at, seconds = buckets[seen], base[seen, width]
        line = np.interp(buckets, at, seconds)
        if len(at) > 1:
            slope = max((seconds[-1] - seconds[-2]) / (at[-1] - at[-2]), 0.0)
            line = line + np.maximum(buckets - at[-1], 0.0) * slope
        out[:, width] = line
    for width in set(range(len(widths))) - set(whole):
        # Drafting at all costs more than one more row: plain decoding says little about the next width.
        near = [other for other in whole if (widths[other] > 1) == (widths[width] > 1)] or whole
        column = np.array([np.interp(widths[width], widths[near], row) for row in out[:, near]])
        seen = np.isfinite(base[:, width])
        ratio = base[seen, width] / column[seen]
        out[:, width] = column * (ratio.mean() if seen.any() else 1.0)
    return out
