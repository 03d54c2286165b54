"""How often a decode step comes after a prefill, and what that adds to the time of steps of every width."""

from __future__ import annotations

import math

import numpy as np

WINDOW = 128  # steps after which what was counted weighs 1/e
MOST = 1.0 - 1.0 / WINDOW  # of the steps that are taken to come after a prefill: beyond, the count says nothing


class Interruptions:
    """Counts of prefills between decode steps: a part of their cost is paid once, whatever they prefill.

    In balance as many requests arrive as end: x per step, in proportion to the tokens that the step commits. All
    that arrive before a step are prefilled together, so 1 - exp(-x) of the steps come after a prefill. The share
    that did lately, and what these steps committed, give x for any other number of committed tokens.
    """

    def __init__(self) -> None:
        self._prefilled = False
        self._share = 0.0  # of the steps of the window that came after a prefill
        self._committed = 0.0  # tokens of such a step, of all requests together; 0 before the first

    def prefill(self) -> None:
        """Requests were prefilled; several prefills before one decode step count once."""
        self._prefilled = True

    def step(self, committed: float) -> None:
        """A decode step is launched that commits so many tokens of all requests together, in expectation."""
        self._share += (self._prefilled - self._share) / WINDOW
        self._committed += (committed - self._committed) / (WINDOW if self._committed else 1)
        self._prefilled = False

    def share(self, committed: np.ndarray) -> np.ndarray:
        """Of the steps that commit so many tokens [...], how many come after a prefill: in [0, 1]."""
        if not self._committed:
            return 0.0 * committed
        arrivals = -math.log(1.0 - min(self._share, MOST)) / self._committed  # per token
        return -np.expm1(-arrivals * committed)
