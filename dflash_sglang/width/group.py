"""What ranks that run a step together tell one another, so that rank 0 decides for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Exchange = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Group:
    """The ranks that run a step together. The defaults are those of a rank alone."""

    decides: bool = True  # whether this is the rank that decides
    # Takes a row of float64 [n], returns the deciding rank's. All ranks call it in the same order. None: there are
    # no others.
    broadcast: Exchange | None = None
    # Takes this rank's row [n], returns those of all ranks [ranks, n], one call late (`OneStepLate`). Only where
    # ranks hold requests of their own.
    gather: Exchange | None = None


class OneStepLate:
    """A gather whose answer is the one to the previous call; to the first call it is one rank without requests.

    `start` starts an exchange and hands out a function that waits for it, so that it takes place beside the step.
    """

    def __init__(self, start: Callable[[np.ndarray], Callable[[], np.ndarray]]):
        self._start = start
        self._wait: Callable[[], np.ndarray] | None = None

    def __call__(self, row: np.ndarray) -> np.ndarray:
        answer = np.zeros((1, len(row))) if self._wait is None else self._wait()
        self._wait = self._start(row)
        return answer
