"""What the ranks of a group exchange so that all of them choose the same width.

A choice is a function of the configuration, of the step times and of the requests' acceptance. Ranks of one
tensor-parallel group run the same requests and read the same accept lengths, so the last is equal among them
already; the times that each of them measures are not. Ranks of data-parallel attention hold different requests
but replay one graph, so they need one width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Share = Callable[[np.ndarray], np.ndarray]
Gather = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Group:
    """How ranks that must choose alike exchange rows of float64. The defaults are those of a rank alone.

    ``share_times``: takes this rank's row [n], returns rank 0's. Called once at start-up with the step-time table
    and then every `WidthConfig.exchange_every` choices, at the same choice on every rank.

    ``gather_loads``: takes this rank's row [n], returns every rank's [ranks, n] in the same order on every rank.
    Called at every choice; needed where ranks hold different requests, and where hosts of one group have
    different processors, on which sums may differ in their last bit. It may be one step late (`OneStepLate`).
    """

    share_times: Share | None = None
    gather_loads: Gather | None = None


class OneStepLate:
    """A gather whose answer is the one to the previous call; to the first call it is one rank without requests.

    `gather` may start an exchange and hand out a function that waits for it, so that it takes place beside the
    step.
    """

    def __init__(self, start: Callable[[np.ndarray], Callable[[], np.ndarray]]):
        self._start = start
        self._wait: Callable[[], np.ndarray] | None = None

    def __call__(self, row: np.ndarray) -> np.ndarray:
        answer = np.zeros((1, len(row))) if self._wait is None else self._wait()
        self._wait = self._start(row)
        return answer
