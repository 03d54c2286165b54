"""How often a decode step comes after a prefill, and what that adds to the time of steps of every kind."""

from __future__ import annotations

import math

import numpy as np

WINDOW = 128  # steps after which what was counted weighs 1/e
MOST = 1.0 - 1.0 / WINDOW  # of the steps that are taken to come after a prefill: beyond, the count says nothing
KEPT = 64  # prefills after which what one took weighs 1/e
PRIOR = 4.0  # prefills that a pass over the weights is worth
PAUSE = 4.0  # a prefill that took so many times what was expected counts as such a one


class Interruptions:
    """Counts and times of prefills between decode steps: a part of their cost is paid once, whatever they prefill.

    In balance as many requests arrive as end: x per step, in proportion to the tokens that the step commits. All
    that arrive before a step are prefilled together, so 1 - exp(-x) of the steps come after a prefill. The share
    that did lately, and what these steps committed, give x for any other number of committed tokens.

    What a prefill adds is a line over its tokens (least squares). Its slope costs every kind the same per
    committed token. Its value at 0 tokens is what counts (`once`). Before any was measured, that is a pass over
    the target's weights.
    """

    def __init__(self) -> None:
        self._tokens: int | None = None  # prefilled since the last decode step
        self._share = 0.0  # of the steps of the window that came after a prefill
        self._committed = 0.0  # tokens of such a step, of all requests together; 0 before the first
        self._sums = np.zeros(5)  # of measured prefills: count, tokens, seconds, tokens^2, tokens * seconds

    def prefill(self, tokens: int) -> None:
        """So many tokens of prompts were prefilled; several prefills before one decode step count once."""
        self._tokens = tokens + (self._tokens or 0)

    def step(self, committed: float) -> int | None:
        """A decode step is launched that commits so many tokens of all requests together, in expectation. Returns
        the tokens that were prefilled before it; None where nothing was."""
        tokens, self._tokens = self._tokens, None
        self._share += ((tokens is not None) - self._share) / WINDOW
        self._committed += (committed - self._committed) / (WINDOW if self._committed else 1)
        return tokens

    def observe(self, tokens: int, seconds: float, weights: float) -> None:
        """A prefill of so many tokens added so many seconds. weights: of a pass over the target's weights."""
        once, each = self._line(weights)
        seconds = min(max(seconds, 0.0), PAUSE * max(once + each * tokens, weights))
        self._sums *= 1.0 - 1.0 / KEPT
        self._sums += 1.0, tokens, seconds, tokens * tokens, tokens * seconds

    def once(self, weights: float) -> float:
        """Seconds that a prefill adds, whatever it prefills."""
        return self._line(weights)[0]

    def _line(self, weights: float) -> tuple[float, float]:
        """(seconds at no token, seconds of a token), both at least 0. Where all prefills had about as many tokens,
        tokens count for nothing."""
        count, tokens, seconds, squares, products = self._sums.tolist()
        if not count:
            return weights, 0.0
        mean, spread = tokens / count, squares - tokens * tokens / count
        each = max((products - mean * seconds) / (spread + mean * mean), 0.0) if mean else 0.0
        once = max(seconds - each * tokens, 0.0)
        return (once + PRIOR * weights) / (count + PRIOR), each

    def share(self, committed: np.ndarray) -> np.ndarray:
        """Of the steps that commit so many tokens [...], how many come after a prefill: in [0, 1]."""
        if not self._committed:
            return 0.0 * committed
        arrivals = -math.log(1.0 - min(self._share, MOST)) / self._committed  # per token
        return -np.expm1(-arrivals * committed)
