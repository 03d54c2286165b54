"""Alarm: judges acceptance by its counts alone, tells a broken draft from hard text, and says what to check.

Steps of a request whose proposals were copied are left out: copies come true whatever the draft is worth.

Of hard text few proposals are accepted. Where one is, the next ones are likely too, since a draft that works reads
the target's context. A broken draft guesses from the last token only: some first proposals are right, and hardly
any after them. So the judge is the accept length of an endless block, as the first `POSITIONS` positions foretell
it (`Window.broken`). The block and the widths that are served do not change it. `check` judges by the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dflash_sglang.broken import POSITIONS, Window
from dflash_sglang.checkpoint.in_words import TARGET, TEXT, PairFacts
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.observe.counts import Totals

CHANCE, FELL, NONE = "chance_level", "fell", "none"
STATES = (CHANCE, FELL)

WINDOW = 1000  # request-steps that verify these positions
STAYS = 3  # windows in a row that raise an alarm
SILENCE = 3600.0  # seconds between two lines
PAGE = "docs/guide/troubleshooting.md"


class Raised(NamedTuple):
    """A line is due."""

    state: str  # one of STATES
    seen: Window  # the latest
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
        self.before: Window | None = None  # the first one above chance
        self._low = 0  # windows in a row
        self._next_line = float("-inf")

    @property
    def state(self) -> str:
        if self._low < STAYS:
            return NONE
        return CHANCE if self.before is None else FELL

    def observe(self, steps: Totals, now: float) -> Raised | None:
        """Judge what came since the last call. now: seconds of any clock that only rises."""
        self._judge(steps)
        if self.state == NONE or self._seen is None or now < self._next_line:
            return None
        self._next_line = now + SILENCE
        return Raised(self.state, self._seen, self.before)

    def _judge(self, steps: Totals) -> None:
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


@dataclass
class Causes:
    """The pair that serves. `context_tokens`: of all request-steps together."""

    pair: PairFacts
    context_tokens: int = 0

    def line(self, raised: Raised, request_steps: int) -> str:
        """Return the one line. request_steps: since start-up."""
        causes = [*self.pair.causes(self.context_tokens // max(request_steps, 1), "on average"), TARGET, TEXT]
        if raised.state == FELL:  # the checkpoints are as they were
            updated = "weights of the target were updated, and the draft's were not"
            if isinstance(self.pair.spec, MtpSpec):  # an update of the target reaches them
                updated = "weights of the target were updated without those of its multi-token-prediction layers"
            causes = [updated, TARGET, TEXT, *causes[:-2]]
        listed = "; ".join(f"({number}) {cause}" for number, cause in enumerate(causes, start=1))
        return f"dflash_sglang acceptance alarm: {_seen(raised)} Check, likeliest first: {listed}. See {PAGE}"


def _seen(raised: Raised) -> str:
    before = "" if raised.before is None else f" After warm-up they were {_shares(raised.before)}."
    positions = " ".join(map(str, range(1, len(raised.seen) + 1)))
    return (
        "the draft proposes as if it did not see the target's context. Shares of request-steps that accept "
        f"proposal {positions}, with all before it: {_shares(raised.seen)}.{before}"
    )


def _shares(window: Window) -> str:
    return f"{' '.join(f'{share:.0%}' for share in window)} (accept length about {window.accept_length:.1f})"
