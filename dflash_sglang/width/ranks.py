"""How ranks agree on one width: the exchanges of `collectives`, over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dflash_sglang.sglang_names.scheduler import get_parallel, get_tp_group
from dflash_sglang.width import Group, OneStepLate


def width_group(nodes: int) -> Group:
    """How the ranks of this process's tensor-parallel group choose one width; nodes: that they are on."""
    ranks, parallel = get_tp_group(), get_parallel()
    if ranks.world_size == 1:
        return Group()
    loads = None
    if parallel.attn_dp_enabled or nodes > 1:
        loads = OneStepLate(_gather(ranks, parallel.attn_tp_size))
    return Group(share_times=_share(ranks), gather_loads=loads)


def _share(ranks: Any) -> Callable[[np.ndarray], np.ndarray]:
    def share(row: np.ndarray) -> np.ndarray:
        shared = torch.tensor(row, dtype=torch.float64)
        torch.distributed.broadcast(shared, src=ranks.ranks[0], group=ranks.cpu_group)
        return shared.numpy()

    return share


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
