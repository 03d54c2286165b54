"""How long a step takes that drafts blocks of one width and verifies fewer tokens of some requests.

Such a step is at least as long as one that drafts the same and verifies as few tokens as can be. What more
tokens add depends on how many there are in all; steps whose blocks have one width (`step_times`) say how much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_sglang.width.step_times import StepTimes, filled

LEAST = 0.1  # of a step of whole blocks, that one takes which verifies as few tokens as can be
COMPARED = 0.5  # of the error of a step of one kind after one of the other, what the factor follows
MOST_COMPARED = 0.1  # the largest such error that counts
FORGET = 512  # steps of whole blocks after which what was compared weighs 1/e
COMPARISONS, APART = 0.0025, 64  # of the time, what steps in between may take longer; steps from one to the next


class RaggedTimes:
    """Seconds of a step by captured batch size, draft width and verified tokens.

    `record` takes what start-up measures: steps that draft at a width and verify about one token of each request.
    It keeps their part of the step whose blocks all have that width: corrections of the one correct the other.

    A factor of all such steps corrects the table. It follows the errors of steps of one kind that come after one
    of the other (`compare`); while blocks are verified in part, some steps are to verify them whole (`compares`).
    """

    def __init__(self, step_times: StepTimes):
        """step_times: of steps with blocks of one width, the narrowest of which is plain decoding."""
        self._times = step_times
        self._widths = np.array(step_times.widths)
        self._samples: dict[tuple[int, int], list[float]] = {}
        self._part = np.ones((len(step_times.buckets), len(self._widths)))
        self._factor = 1.0
        self._in_part = False  # the observed step before
        self._since = 0  # steps in part since the last one in between

    def record(self, batch: int, width: int, context_tokens: int, seconds: float) -> None:
        """A step of `batch` requests that drafted at `width` and verified as few tokens as can be. To be called
        once the step times are fitted."""
        bucket, index = self._times.bucket(batch), self._times.widths.index(width)
        part = seconds / self._times.seconds(bucket, context_tokens)[index]
        self._samples.setdefault((bucket, index), []).append(part)

    def fit(self) -> None:
        """Builds the table from what was recorded; without any, fewer verified tokens spare nothing."""
        if not self._samples:
            return
        part = np.full(self._part.shape, np.nan)
        for cell, samples in self._samples.items():
            part[cell] = np.median(samples)
        self._part = filled(part, np.array(self._times.buckets, float), self._widths.astype(float)).clip(LEAST, 1)
        self._part[:, 0] = 1.0

    def table(self) -> np.ndarray:
        """The fitted table as one row [buckets * widths], for a group to share."""
        return self._part.ravel()

    def load(self, row: np.ndarray) -> None:
        """Takes another rank's `table()`."""
        self._part = row.reshape(self._part.shape)

    def seconds(self, bucket: int, step: Sequence[float], tokens: Sequence[int]) -> np.ndarray:
        """[widths, totals] of steps that verify `tokens` [totals], given those of blocks of every width, `step`
        [widths], as `StepTimes.seconds` has them for this bucket."""
        uniform = np.array(step)
        least = uniform * self._part[bucket]
        added = np.maximum.accumulate(uniform - least)
        each = np.array(tokens) / self._times.buckets[bucket]
        return self._factor * (least[:, None] + np.interp(each, self._widths, added))

    def compares(self, seconds: float, whole: float) -> bool:
        """Whether a step that would verify blocks in part in `seconds` verifies them whole, in `whole`."""
        self._since += 1
        if self._since < APART or whole - seconds > COMPARISONS * seconds * self._since:
            return False
        self._since = 0
        return True

    def compare(self, in_part: bool, error: float) -> None:
        """A step was observed, and took 1 + error of what was expected."""
        if in_part != self._in_part:
            move = COMPARED * min(max(error, -MOST_COMPARED), MOST_COMPARED)
            self._factor *= 1.0 + move if in_part else 1.0 - move
        elif not in_part:
            self._factor += (1.0 - self._factor) / FORGET
        self._in_part = in_part
