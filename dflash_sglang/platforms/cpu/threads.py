"""How many threads torch computes with. One thread too many waits in turn for a core, and all others for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

VARIABLE = "OMP_NUM_THREADS"
_SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def share_cores(**_: Any) -> None:
    """Stands in for the binding of threads by sgl-kernel's CPU build, in each rank before it loads weights.

    Without it torch takes all of the machine's CPUs in every rank, whatever the container allows. A user's
    OMP_NUM_THREADS stays as it is.
    """
    from sglang.srt.runtime_context import get_parallel

    if VARIABLE in os.environ:
        return
    parallel = get_parallel()
    ranks = max(1, parallel.dp_size * parallel.tp_size * parallel.pp_size // parallel.nnodes)
    torch.set_num_threads(threads_of(cores(), ranks))
    logger.info("dflash_sglang CPU threads: %d (%s is not set)", torch.get_num_threads(), VARIABLE)


def threads_of(cores: int, ranks: int) -> int:
    """Threads of each of a machine's ranks. A core is left for launcher, detokenizer and the rest."""
    return max(1, (cores - 1) // ranks)


def cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may use: by its affinity, and by the limit of its container."""
    own = {_read(root / _SIBLINGS.format(cpu)) or str(cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(own), int(_limit(root / "sys/fs/cgroup"))))


def _limit(cgroups: Path) -> float:
    """CPUs of the container by cgroups of version 2 or 1; more than any machine has where it has no limit."""
    quota, period = (_read(cgroups / "cpu.max").split() or ["", ""])[:2]
    if not quota:
        quota, period = (_read(cgroups / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else 1 << 16


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # no such kernel, or a sandbox
        return ""
