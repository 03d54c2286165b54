"""Where a worker's pools keep what hooks watch."""

from __future__ import annotations

from typing import Any

import torch


def kv_pools(worker: Any) -> list[Any]:
    """The target's and the draft's."""
    return [worker.target_worker.model_runner.token_to_kv_pool, worker.model_runner.token_to_kv_pool]


def kv_buffers(pool: Any) -> list[torch.Tensor]:
    """Each [slots, heads, head_dim]: K of every layer, then V."""
    pool = getattr(pool, "full_kv_pool", pool)  # of a recurrent target
    return [*pool.k_buffer, *pool.v_buffer]


def recurrent_states(worker: Any) -> list[torch.Tensor]:
    """Each [layers, slots, ...], float32; none for a target without recurrent layers."""
    pool = getattr(worker.target_worker.model_runner.req_to_token_pool, "mamba_pool", None)
    return [] if pool is None else [*pool.mamba_cache.conv, pool.mamba_cache.temporal]


def table_of(worker: Any) -> torch.Tensor:
    """[requests, positions]: the slot of each token."""
    return worker.target_worker.model_runner.req_to_token_pool.req_to_token
