"""Alarm: judges acceptance by its counts alone, and tells a broken draft from hard text.

Steps of a request whose proposals were copied are left out: copies come true whatever the draft is worth.

Of hard text few proposals are accepted. Where one is, the next ones are likely too, since a draft that works reads
the target's context. A broken draft guesses from the last token only: some first proposals are right, and hardly
any after them. So the judge is the accept length of an endless block, as the first `POSITIONS` positions foretell
it (`Window.broken`). The block and the widths that are served do not change it. `check` judges by the same.
"""

from __future__ import annotations

from typing import NamedTuple

from dflash_sglang.broken import POSITIONS, Window
from dflash_sglang.observe.counts import Totals

CHANCE, FELL, BREAK_EVEN, NONE = "chance_level", "fell", "break_even", "none"
STATES = (CHANCE, FELL, BREAK_EVEN)

WINDOW = 1000  # request-steps that verify these positions; steps for the break-even
STAYS = 3  # windows in a row that raise an alarm
MOSTLY = 0.9  # share of steps that were better plain
FEW_REQUESTS = 8.0  # of a step; with more, plain decoding may be faster with any draft
SILENCE = 3600.0  # seconds between two lines


class Raised(NamedTuple):
    """A line is due."""

    state: str  # one of STATES
    seen: Window | None  # the latest window; None for BREAK_EVEN
    before: Window | None  # after warm-up, where the pair worked then


class Alarm:
    """Fed with the counts of each interval; answers `Raised` when a line is due, at most once in `SILENCE`.

    `state` is for the gauge: it says at any time what is wrong.
    """

    def __init__(self, block: int) -> None:
        """block: width of the widest blocks."""
        self.block = block
        self._positions = min(POSITIONS, block - 1)
        self._open: Totals | None = None
        self._seen: Window | None = None
        self.before: Window | None = None  # the first window above chance
        self._low = self._plain = 0  # windows in a row
        self._steps = self._plain_steps = self._requests = 0
        self._next_line = float("-inf")

    @property
    def state(self) -> str:
        if self._low >= STAYS:
            return CHANCE if self.before is None else FELL
        return BREAK_EVEN if self._plain >= STAYS else NONE

    def observe(self, steps: Totals, plain_steps: int, now: float) -> Raised | None:
        """What came since the last call. now: seconds of any clock that only rises.

        plain_steps: how many of the steps drafted nothing because width 1 was estimated to be faster."""
        self._judge_acceptance(steps)
        self._judge_break_even(steps, plain_steps)
        if self.state == NONE or now < self._next_line:
            return None
        self._next_line = now + SILENCE
        return Raised(self.state, None if self.state == BREAK_EVEN else self._seen, self.before)

    def _judge_acceptance(self, steps: Totals) -> None:
        self._open = steps if self._open is None else self._open.plus(steps)
        if not self._positions or self._open.verified_drafts[self._positions - 1] < WINDOW:
            return
        counts = (
            of[: self._positions].tolist() for of in (self._open.verified_drafts, self._open.accepted_drafts)
        )
        self._seen, self._open = Window.from_counts(*counts), None
        low = self._seen.broken
        self._low = self._low + 1 if low else 0
        if self.before is None and not low:
            self.before = self._seen

    def _judge_break_even(self, steps: Totals, plain_steps: int) -> None:
        self._steps += steps.steps
        self._requests += steps.requests
        self._plain_steps += plain_steps
        if self._steps >= WINDOW:
            few = self._requests <= FEW_REQUESTS * self._steps
            self._plain = self._plain + 1 if few and self._plain_steps >= MOSTLY * self._steps else 0
            self._steps = self._requests = self._plain_steps = 0
