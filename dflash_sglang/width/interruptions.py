"""How often a decode step comes after a prefill, from counts alone, and what that adds to steps of every width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

WINDOW = 128  # steps after which what was counted weighs 1/e
MOST = 1.0 - 1 / 64  # of the steps that are taken to come after a prefill: beyond, their number says nothing

Tokens = TypeVar("Tokens", float, np.ndarray)


class Interruptions:
    """Prefills between decode steps: a part of their cost is paid once, whatever they prefill.

    In balance as many requests arrive as end: x per step, in proportion to the tokens that it commits. All that
    arrive before a step are prefilled together, so that 1 - exp(-x) of the steps come after a prefill. The share
    that did lately, and what these steps committed, give x for any other number of committed tokens.

    The exponential is (1 + x / 16) ** -16, by products and square roots: their last bit is the same on every
    processor, so that ranks with equal counts have equal results.
    """

    def __init__(self) -> None:
        self._prefilled = False
        self._share = 0.0  # of the steps of the window that came after a prefill
        self._committed = 0.0  # tokens of such a step, of all requests together; 0 before the first
        self._per_token = 0.0  # x / 16

    def prefill(self) -> None:
        """Requests were prefilled; several prefills before one decode step count once."""
        self._prefilled = True

    def step(self, committed: float) -> None:
        """A decode step is launched that commits so many tokens of all requests together, in expectation."""
        if not self._committed:
            self._committed = committed
        self._share += (self._prefilled - self._share) / WINDOW
        self._committed += (committed - self._committed) / WINDOW
        self._prefilled = False
        root = math.sqrt(math.sqrt(math.sqrt(math.sqrt(1.0 - min(self._share, MOST)))))
        self._per_token = (1.0 / root - 1.0) / self._committed

    def share(self, committed: Tokens) -> Tokens:
        """Of the steps that commit so many tokens, how many come after a prefill: in [0, 1]."""
        power = 1.0 + committed * self._per_token
        power *= power
        power *= power
        power *= power
        power *= power
        return 1.0 - 1.0 / power

    def added(self, seconds: Sequence[float], committed: Sequence[float], once: float) -> list[float]:
        """seconds [widths] of decode steps that commit so many tokens [widths], with their part of `once`, the
        seconds that every prefill takes besides those of its tokens."""
        return [step + once * self.share(tokens) for step, tokens in zip(seconds, committed, strict=True)]
