"""How ranks that run a step together get one width: rank 0 decides, the others are told.

All ranks replay graphs of the same width, so they need one decision. Ranks of tensor parallelism run the same
requests: rank 0 knows all that counts. Ranks of data-parallel attention hold requests of their own: each tells its
load in every step, and rank 0 decides by the loads of the step before. Exchanges are over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dflash_sglang.sglang_names.scheduler import get_parallel, get_tp_group
from dflash_sglang.width.group import Exchange, Group, OneStepLate


def width_group() -> Group:
    """The tensor-parallel group of this process."""
    ranks, parallel = get_tp_group(), get_parallel()
    if ranks.world_size == 1:
        return Group()
    gather = OneStepLate(_gather(ranks, parallel.attn_tp_size)) if parallel.attn_dp_enabled else None
    return Group(ranks.rank_in_group == 0, _broadcast(ranks), gather)


def _broadcast(ranks: Any) -> Exchange:
    def broadcast(row: np.ndarray) -> np.ndarray:
        shared = torch.tensor(row, dtype=torch.float64)
        torch.distributed.broadcast(shared, src=ranks.ranks[0], group=ranks.cpu_group)
        return shared.numpy()

    return broadcast


def _gather(ranks: Any, same_batch: int) -> Callable[[np.ndarray], Callable[[], np.ndarray]]:
    """same_batch: ranks with one data-parallel rank's batch, neighbours in the group; the first row counts."""

    def start(row: np.ndarray) -> Callable[[], np.ndarray]:
        own = torch.tensor(row, dtype=torch.float64)
        rows = torch.empty((ranks.world_size, len(row)), dtype=torch.float64)
        work = torch.distributed.all_gather(list(rows.unbind()), own, group=ranks.cpu_group, async_op=True)

        def answer() -> np.ndarray:
            work.wait()
            return rows[::same_batch].numpy()

        return answer

    return start
