"""When a draft counts as broken: one rule for the acceptance alarm of a server and for `dflash-sglang check`."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable

POSITIONS = 3  # of the block, whose acceptance is judged
CHANCE_LENGTH = 1.5  # estimated accept length below which a draft is taken for broken (docs/results/alarm.md)
LONGEST_RUN = 0.85  # most that is taken for the chance of one more proposal: any draft guesses a text's loops


class Window(tuple[float, ...]):
    """Shares of request-steps that accept the drafted proposals up to each of the first positions, one or more."""

    @classmethod
    def from_counts(cls, verified: Iterable[int], accepted: Iterable[int]) -> Window:
        """Of the first `POSITIONS` positions, up to one that nothing verified.

        verified, accepted: request-steps that verify and accept the drafted proposal at position 1, 2, ..."""
        seen = itertools.takewhile(operator.itemgetter(0), zip(verified, accepted, strict=True))
        return cls(float(of) / float(tried) for tried, of in itertools.islice(seen, POSITIONS))

    @property
    def accept_length(self) -> float:
        """Estimate for a block without an end: later proposals go on like the last one here after the one before.
        After the only position of a block they are taken to go on for `LONGEST_RUN`."""
        *before, last = self
        more = LONGEST_RUN
        if before:
            more = min(last / before[-1], LONGEST_RUN) if before[-1] else 0.0
        return 1.0 + sum(before) + last / (1.0 - more)

    @property
    def broken(self) -> bool:
        """Whether the draft proposes as if it did not see the target's context."""
        return self.accept_length < CHANCE_LENGTH
