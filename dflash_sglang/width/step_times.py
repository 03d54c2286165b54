"""How long a step takes: a table over padded batch and kind, measured at start-up and corrected while serving; and
how often prefills come between steps."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dflash_sglang.settings.width import PLAIN
from dflash_sglang.width.options import Kind

# Chosen in the simulation (docs/results/width-simulated.md).
MEASURED, FILLED = 2 / 3, 2.0  # variance of a cell, over that of an observation: measured at start-up, or not
DRIFT = 1 / 240  # that it grows by with each step, up to that of a cell that nobody measured
TO_CELL = 0.7  # of an error, the part that goes to the factor of its cell
TO_HOST = 0.25  # of an error, the part that goes to the host's time with each step
PACE_STEPS = 5  # the latest ones, of which one or two may be outliers
SPACING = 4  # from one batch size that start-up measures to the next
LEAST_LIMIT = 0.1  # an error counts at most this much, or as much as the gain: pauses hardly move a table
LEAST = 0.1  # of the time of a chain, that of a ragged step of the same width
# Of prefills between steps.
WINDOW = 128  # steps after which what was counted weighs 1/e
MOST = 1.0 - 1.0 / WINDOW  # of the steps that are taken to come after a prefill: beyond, the count says nothing


class Sample(NamedTuple):
    """A step that start-up measured; of a ragged kind with as few tokens as can be."""

    batch: int
    kind: Kind
    context_tokens: int  # of the whole batch
    seconds: float  # of the device
    host: float = 0.0  # seconds in which the host launched it, where the device runs beside it


class StepTimes:
    """Seconds of a step for every captured batch size and kind.

    A step takes as long as the device or as the host, whichever takes longer. The host launches it, which start-up
    measures for each form of step (plain, chains, ragged, trees), and does a rest of the loop's turn, the same
    for all. Steps that the device waited for tell this rest, others the device's time.

    On the device a step takes `base[bucket, kind] + slope[kind] * context_tokens`, with `context_tokens` the sum
    over the batch. `fit` takes what start-up measures and fills what it did not. Along the batch sizes that is
    piecewise linear, which keeps what is monotone monotone; beyond the largest measured one it follows the last
    slope, because a step is bound by its tokens there. Widths that were not measured follow their neighbours.
    Trees take for ever where they were not measured.

    The base of a ragged kind is a step that verifies one token of each request. What more tokens add depends on
    how many there are in all: chains say how much.

    `observe` corrects the table by two kinds of factors.

    - The pace of the machine, one factor of the whole table: the median of the latest steps. A slower machine, for
      long or for a few steps, changes no ratio between kinds.
    - A factor per cell, with a Kalman gain. The variance of a cell grows with its age, so a few probes correct
      what start-up or a slow spell left wrong.
    """

    def __init__(self, buckets: Sequence[int], kinds: Sequence[Kind]):
        """`buckets`: the captured batch sizes, ascending; `kinds`: those to choose from (`kinds_of`)."""
        self.buckets, self.kinds = list(buckets), list(kinds)
        self._widths = [kind.width for kind in kinds if kind == Kind(kind.width)]
        self._pace = 1.0
        self._latest: deque[float] = deque(maxlen=PACE_STEPS)  # times over those of the table without the pace
        cells = len(self.buckets), len(self.kinds)
        self._by_cell = np.ones(cells)
        self._variance = [[FILLED] * len(self.kinds) for _ in self.buckets]
        self._observed = 0  # steps
        self._last_observed = [[0] * len(self.kinds) for _ in self.buckets]
        self._base, self._slope = np.full(cells, np.inf), np.zeros(len(self.kinds))
        self._added = np.zeros((len(self.buckets), len(self._widths)))  # what a ragged step takes for these rows
        forms = [(kind.ragged, kind.nodes is not None, kind.width == PLAIN) for kind in kinds]
        self._form = np.array([sorted(set(forms)).index(form) for form in forms])
        self._launch = np.zeros(len(set(forms)))  # seconds, by form; of the slowest one where nothing is known
        self._rest = 0.0  # seconds of a turn of the loop, beyond the launch

    def bucket(self, batch: int) -> int:
        """Index of the captured batch size that a batch is padded to. Raises ValueError beyond the largest."""
        index = bisect.bisect_left(self.buckets, batch)
        if index == len(self.buckets):
            raise ValueError(f"batch={batch}: expected at most {self.buckets[-1]}, the largest of the step times.")
        return index

    # ---- Start-up ----------------------------------------------------------------------------------------

    def fit(self, samples: Sequence[Sample]) -> None:
        """Builds the table. The shortest time of equal steps counts: what else runs on the machine only adds.

        Raises ValueError without samples."""
        shortest: dict[tuple[int, int], dict[int, float]] = {}  # by cell and context
        for batch, kind, context, seconds, _ in samples:
            of_cell = shortest.setdefault((self.bucket(batch), self.kinds.index(kind)), {})
            of_cell[context] = min(seconds, of_cell.get(context, seconds))
        if not shortest:
            raise ValueError("no step time was measured: expected at least one cell of `startup_cells`.")
        measured = {cell: list(of_cell.items()) for cell, of_cell in shortest.items()}
        lines = [[line for cell, line in measured.items() if cell[1] == kind] for kind in range(len(self.kinds))]
        usual = _slope([line for of_kind in lines for line in of_kind]) or 0.0
        slopes = [_slope(of_kind) for of_kind in lines]
        # Every kind reads the same context: what differs between them is half noise.
        self._slope = np.array([usual if slope is None else (slope + usual) / 2 for slope in slopes])
        base = np.full((len(self.buckets), len(self.kinds)), np.nan)
        for (bucket, index), line in measured.items():
            rest = [max(seconds - self._slope[index] * context, 0.1 * seconds) for context, seconds in line]
            base[bucket, index] = sum(rest) / len(rest)
            self._variance[bucket][index] = MEASURED
        self._base = self._filled(base)
        launched: dict[int, list[float]] = {}
        for of in samples:
            launched.setdefault(self._form[self.kinds.index(of.kind)], []).append(of.host)
        known = {form: statistics.median(of_form) for form, of_form in launched.items()}
        self._launch = np.array([known.get(form, max(known.values())) for form in range(len(self._launch))])

    def _filled(self, base: np.ndarray) -> np.ndarray:
        """base [buckets, kinds], its NaN (what nothing was measured of) filled."""
        chains, at, widths = len(self._widths), np.array(self.buckets, float), np.array(self._widths, float)
        base[:, :chains] = filled(base[:, :chains], at, widths)
        ragged = [index for index, kind in enumerate(self.kinds) if kind.ragged]
        if ragged:
            of_chain = base[:, [self._widths.index(self.kinds[index].width) for index in ragged]]
            known = np.isfinite(base[:, ragged]).any()
            of_ragged = filled(base[:, ragged], at, widths[1:]) if known else of_chain
            base[:, ragged] = of_ragged.clip(LEAST * of_chain, of_chain)
            added = base[:, 1:chains] - base[:, ragged]
            self._added[:, 1:] = np.maximum.accumulate(added, axis=1)
        return np.nan_to_num(base, nan=np.inf)

    # ---- Serving -----------------------------------------------------------------------------------------

    def host(self, launches: int = 1) -> np.ndarray:
        """[kinds] expected seconds of the host in a step, which takes as long as so many launches; 2 after a step
        of another kind: on an H200 0.9 ms became 2.3."""
        return launches * self._launch[self._form] + self._rest

    def seconds(self, bucket: int, context_tokens: float) -> np.ndarray:
        """[kinds] expected seconds of the device in a step, of a ragged one with a token of each request."""
        return (self._base[bucket] + self._slope * context_tokens) * self.factors(bucket)

    def of_kind(self, bucket: int, kind: int, context_tokens: float, more: float = 0.0) -> float:
        """Expected seconds of the device in a step of one kind, given as an index. more: what its rows add, of a
        ragged one."""
        of_table = self._base[bucket, kind] + self._slope[kind] * context_tokens + more
        return float(of_table * self._by_cell[bucket, kind] * self._pace)

    def added(self, bucket: int, tokens: np.ndarray) -> np.ndarray:
        """[n] seconds by the table that a ragged step takes beyond its base, if it verifies so many tokens [n]."""
        return np.interp(tokens / self.buckets[bucket], self._widths, self._added[bucket])

    def factors(self, bucket: int) -> np.ndarray:
        """[kinds] expected seconds over those of the table."""
        return self._by_cell[bucket] * self._pace

    def observe(
        self,
        bucket: int,
        kind: int,
        context_tokens: float,
        seconds: float,
        more: float = 0.0,
        steps: int = 1,
        waited: bool = False,
    ) -> None:
        """Learn from steps that were served, their kind given as an index; nothing of one that nobody measured.

        seconds: the median of these. waited: the device waited for the host. more: as in `of_kind`."""
        expected = self.of_kind(bucket, kind, context_tokens, more)
        if not seconds > 0 or math.isinf(expected):
            return
        launch = self._launch[self._form[kind]]
        self._observed += steps
        if waited:
            pause = 2 * max(launch + self._rest, expected)  # hardly moves it
            error_of_rest = max(min(seconds, pause) - launch, 0.0) - self._rest
            self._rest += (1.0 - (1.0 - TO_HOST) ** steps) * error_of_rest
            if seconds >= expected:
                return
        elif launch + self._rest > seconds:
            self._rest = max(seconds - launch, 0.0)
        age = self._observed - self._last_observed[bucket][kind]
        variance = min(self._variance[bucket][kind] + DRIFT * age, FILLED)
        gain = variance / (variance + 1.0)  # Kalman's, and the variance afterwards
        self._variance[bucket][kind], self._last_observed[bucket][kind] = gain, self._observed
        limit = max(LEAST_LIMIT, gain)
        ratio, pace = seconds / expected, self._pace
        self._latest.extend([ratio * pace] * min(steps, PACE_STEPS))
        if len(self._latest) == PACE_STEPS:
            self._pace = statistics.median(self._latest)
        if abs(ratio - 1.0) > limit:  # of the machine rather than of the kind
            ratio *= pace / self._pace
        error = min(max(ratio - 1.0, -limit), limit)
        self._by_cell[bucket, kind] *= 1.0 + TO_CELL * gain * error


class Interruptions:
    """Counts prefills between decode steps: a part of their cost is paid once, whatever they prefill.

    In balance as many requests arrive as end: x per step, in proportion to the tokens that the step commits. All
    that arrive before a step are prefilled together, so 1 - exp(-x) of the steps come after a prefill. The share
    that did lately, and what these steps committed, give x for any other number of committed tokens.
    """

    def __init__(self) -> None:
        self._share = 0.0  # of the steps of the window that came after a prefill
        self._committed = 0.0  # tokens of such a step, of all requests together; 0 before the first

    def step(self, committed: float, after_prefill: bool, steps: int = 1) -> None:
        """A decode step is launched that commits so many tokens of all requests together, in expectation; `steps`
        since the one before that was told, with nothing prefilled in between."""
        kept = (1.0 - 1.0 / WINDOW) ** steps
        self._share = self._share * kept + after_prefill / WINDOW
        self._committed += (committed - self._committed) * (1.0 - kept if self._committed else 1.0)

    def share(self, committed: np.ndarray) -> np.ndarray:
        """Of the steps that commit so many tokens [...], how many come after a prefill: in [0, 1]."""
        if not self._committed:
            return 0.0 * committed
        arrivals = -math.log(1.0 - min(self._share, MOST)) / self._committed  # per token
        return -np.expm1(-arrivals * committed)


def startup_cells(
    buckets: Sequence[int],
    kinds: Sequence[Kind],
    trees: Mapping[int, int],
    *,
    max_tokens: int = 8192,
    long_context: int = 4096,
) -> list[tuple[int, Kind, int]]:
    """The (batch, kind, context tokens of the batch) that are worth measuring at start-up.

    Batch sizes a factor of `SPACING` apart and the largest; of those no cell of more than `max_tokens` verified
    tokens (two batch sizes of each width are kept), beyond which time grows with tokens. Chains of one batch size
    of at most 16 are measured at `long_context` tokens per request as well, for the cost of context. Of ragged
    steps the narrowest and the widest are measured: their time is linear in the rows that the draft computes.
    Trees are measured at every batch size at which they are served. trees: {nodes: most requests}.
    """
    ragged = [kind for kind in kinds if kind.ragged]
    between = ragged[1:-1]
    batches = [buckets[0]]
    for bucket in buckets:
        if bucket >= SPACING * batches[-1] or (bucket == buckets[-1] and bucket > batches[-1]):
            batches.append(bucket)
    cells = [
        (batch, kind, 0)
        for index, batch in enumerate(batches)
        for kind in kinds
        if kind.nodes is None and kind not in between and (batch * kind.width <= max_tokens or index < 2)
    ]
    middle = max(batch for batch in batches if batch <= max(16, buckets[0]))
    cells += [(middle, kind, middle * long_context) for kind in kinds if kind == Kind(kind.width)]
    of_trees = [kind for kind in kinds if kind.nodes is not None]
    return cells + [(batch, kind, 0) for kind in of_trees for batch in buckets if batch <= trees[kind.nodes or 0]]


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
