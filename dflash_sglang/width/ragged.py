"""Ragged steps verify another number of tokens of each request: how many together, and what that promises."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_sglang.width.acceptance import Acceptance, Work, ragged_steps_needed
from dflash_sglang.width.confidence import Confidence
from dflash_sglang.width.step_times import Sample, StepTimes, filled

TABULATE_EVERY = 4  # observed steps
# Of the times, chosen in the simulation: without the factor that corrects them, ragged steps that take 1.2 times
# what start-up says give 0.80 of the tokens/s of full blocks; with it 0.995 (docs/results/width-simulated.md).
LEAST = 0.1  # of a step of full blocks, the time of one that verifies as few tokens as can be
COMPARED = 0.5  # of the error of a step of one kind after one of the other, what the factor follows
MOST_COMPARED = 0.1  # the largest such error that counts
FORGET = 512  # steps of full blocks after which what was compared weighs 1/e
COMPARISONS, APART = 0.0025, 64  # of the time, what full steps in between may cost; steps from one to the next


class Offer(NamedTuple):
    """What a step of one width promises."""

    steps_needed: float  # of one request, to commit what a step as requests are served now commits of all
    seconds: float  # of a step
    verify_budget: int | None = None  # tokens that are verified together; None: the width of each request
    share: float = 1.0  # of the proposals that come true, those that are verified


class RaggedTimes:
    """Seconds of a step by captured batch size, draft width and verified tokens.

    Start-up measures steps that draft at a width and verify about one token of each request. Such a step is as
    short as a ragged one can be. What more tokens add depends on how many there are in all; steps of full blocks
    (`step_times`) say how much. Kept is the ratio to the step of full blocks of the same width, so that
    corrections of the one correct the other.

    A factor of all ragged steps corrects the table. It follows the errors of steps of one kind that come after one
    of the other (`compare`). While steps are ragged, a full one comes in between now and then (`compares`).
    """

    def __init__(self, step_times: StepTimes):
        """step_times: of full blocks; the narrowest width is plain decoding."""
        self._times = step_times
        self._widths = np.array(step_times.widths)
        self._least = np.ones((len(step_times.buckets), len(self._widths)))  # ratio to full blocks
        self._factor = 1.0
        self._was_ragged = False  # the observed step before
        self._since = 0  # ragged steps since the last full one in between

    def fit(self, samples: Iterable[Sample]) -> None:
        """Builds the table from steps that verified as few tokens as can be, once the step times are fitted.

        The shortest of a cell counts. Without any, fewer verified tokens spare nothing."""
        least = np.full(self._least.shape, np.nan)
        for batch, width, context, seconds in samples:
            cell = self._times.bucket(batch), self._times.widths.index(width)
            least[cell] = np.fmin(least[cell], seconds / self._times.of_width(*cell, context))
        if np.isnan(least).all():
            return
        self._least = filled(least, np.array(self._times.buckets, float), self._widths.astype(float))
        self._least = self._least.clip(LEAST, 1.0)
        self._least[:, 0] = 1.0

    def seconds(self, bucket: int, full: Sequence[float], budgets: Sequence[int]) -> np.ndarray:
        """[widths, budgets] of steps that verify `budgets` tokens, given those of full blocks, `full` [widths], as
        `StepTimes.seconds` has them for this bucket."""
        blocks = np.array(full)
        least = blocks * self._least[bucket]
        added = np.maximum.accumulate(blocks - least)
        each = np.array(budgets) / self._times.buckets[bucket]
        return self._factor * (least[:, None] + np.interp(each, self._widths, added))

    def compares(self, seconds: float, full: float) -> bool:
        """Whether a step that would be ragged and take `seconds` verifies full blocks, in `full` seconds."""
        self._since += 1
        if self._since < APART or full - seconds > COMPARISONS * seconds * self._since:
            return False
        self._since = 0
        return True

    def compare(self, ragged: bool, error: float) -> None:
        """A step was observed, and took 1 + error of what was expected."""
        if ragged != self._was_ragged:
            move = COMPARED * min(max(error, -MOST_COMPARED), MOST_COMPARED)
            self._factor *= 1.0 + move if ragged else 1.0 - move
        elif not ragged:
            self._factor += (1.0 - self._factor) / FORGET
        self._was_ragged = ragged


class RaggedSteps:
    """At each width the step with the least time for the tokens that arrive. The draft's probabilities say which
    tokens of which requests it verifies (`kernels.block.share_rows`).

    How many proposals of full blocks come true is what `Acceptance` knows of each request. Which share of them is
    among so many rows is what `Confidence` knows of the batch.
    """

    def __init__(self, step_times: StepTimes, acceptance: Acceptance, budgets: Sequence[int]):
        """budgets, ascending: how many tokens a step may verify together."""
        self.times = RaggedTimes(step_times)
        self.confidence = Confidence(acceptance.widths)
        self._widths, self._budgets = acceptance.widths, list(budgets)
        self._of_requests: dict[int, tuple[list[int], list[np.ndarray]]] = {}
        self._tabulated = 0

    def offers(
        self, work: list[Work], requests: int, bucket: int, full: list[Offer], added: Callable[[Any], np.ndarray]
    ) -> list[Offer]:
        """The best step of every width for so many requests, which bring this work.

        full: the offers of full blocks. added: seconds [...] that prefills add to steps that commit so many tokens
        [...]; they count in the comparison and are not in the offers."""
        budgets, choices = self._choices(requests)
        table = self.times.seconds(bucket, [offer.seconds for offer in full], budgets)
        offers, tokens = list(full), requests * full[0].steps_needed
        for width, shares in enumerate(choices, 1):
            fewer = len(shares) - 1  # the last one is full blocks
            steps = ragged_steps_needed(work, width, shares)
            seconds = np.append(table[width, :fewer], full[width].seconds)
            best = int(((seconds + added(tokens / steps)) * steps).argmin())
            if best < fewer:
                offers[width] = Offer(float(steps[best]), float(seconds[best]), budgets[best], float(shares[best]))
        return offers

    def _choices(self, n: int) -> tuple[list[int], list[np.ndarray]]:
        """For n requests: the budgets below full blocks of the widest; and for each width but the first the share
        of what comes true among each of its budgets, the last of which is full blocks."""
        if self.confidence.observed >= self._tabulated + TABULATE_EVERY:
            self._tabulated = self.confidence.observed
            self._of_requests.clear()
        if n not in self._of_requests:
            budgets = [budget for budget in self._budgets if n <= budget < n * self._widths[-1]]
            rows = [[*budgets[: bisect.bisect_left(budgets, n * w)], n * w] for w in self._widths[1:]]
            shares = [self.confidence.share(index, np.array(of) / n) for index, of in enumerate(rows, 1)]
            self._of_requests[n] = budgets, shares
        return self._of_requests[n]


def least_budget(budgets: Sequence[int], requests: int, width: int) -> int | None:
    """As few tokens as a step of so many requests verifies; None where those are full blocks of this width."""
    tokens = budgets[bisect.bisect_left(budgets, requests)]
    return tokens if tokens < requests * width else None
