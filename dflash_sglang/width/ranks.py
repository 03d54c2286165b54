"""How ranks that run a step together get one width: rank 0 decides, the others are told.

All ranks replay graphs of the same width, so they need one decision. Ranks of tensor parallelism run the same
requests: rank 0 knows all that counts. Ranks of data-parallel attention hold requests of their own: each tells its
load in every step, and rank 0 decides by the loads of the step before. Exchanges are over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

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


def width_group() -> Group:
    """The tensor-parallel group of this process."""
    from dflash_sglang.sglang_names.scheduler import get_parallel, get_tp_group

    ranks, parallel = get_tp_group(), get_parallel()
    if ranks.world_size == 1:
        return Group()
    gather = None
    if parallel.attn_dp_enabled:
        gather = OneStepLate(partial(_gather, ranks, parallel.attn_tp_size))
    return Group(ranks.rank_in_group == 0, partial(_broadcast, ranks), gather)


def _broadcast(ranks: Any, row: np.ndarray) -> np.ndarray:
    shared = torch.tensor(row, dtype=torch.float64)
    torch.distributed.broadcast(shared, src=ranks.ranks[0], group=ranks.cpu_group)
    return shared.numpy()


def _gather(ranks: Any, same_batch: int, row: np.ndarray) -> Callable[[], np.ndarray]:
    """same_batch: ranks with one data-parallel rank's batch, neighbours in the group; the first row counts."""
    own = torch.tensor(row, dtype=torch.float64)
    rows = torch.empty((ranks.world_size, len(row)), dtype=torch.float64)
    work = torch.distributed.all_gather(list(rows.unbind()), own, group=ranks.cpu_group, async_op=True)

    def answer() -> np.ndarray:
        work.wait()
        return rows[::same_batch].numpy()

    return answer
