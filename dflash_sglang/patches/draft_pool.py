"""A draft that needs fewer slots than the target leaves their memory to the target's tokens: rings, sliding slots.

SGLang gives the draft as many slots as the target. Here the bytes of rings are taken off the budget, and a
token costs the target's bytes. Where rings would not be smaller than the whole pool, SGLang's arithmetic stays.

A draft with layers at the target's sliding slots has fewer of these than of full ones, and is priced by both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any

from dflash_sglang.kernels.context.rings import RingShape
from dflash_sglang.patches.apply import replace
from dflash_sglang.sglang_names.scheduler import KVCacheConfigurator, SWARequestCapPoolConfigurator, get_schedule

_LEAST = 1  # bytes that SGLang adds to a token for the draft: with none it takes a share of the target's layers


@dataclass
class RingPool:
    """The size of a draft's pool, as far as it is known."""

    shape: RingShape
    rings: int | None = None  # once the target's pool is sized; None: the whole pool
    why_whole: str | None = None  # once the target's pool is sized

    @property
    def slots(self) -> int | None:
        return None if self.rings is None else self.rings * self.shape.size

    def config_of_draft(self, config: Any) -> Any:
        """SGLang's MemoryPoolConfig of the draft, from the target's."""
        return config if self.slots is None else with_fields(config, max_total_num_tokens=self.slots)


def install(shape: RingShape) -> RingPool:
    """Before the target's pools are sized."""
    pool, sized = RingPool(shape), KVCacheConfigurator.config_from_budget

    def config_from_budget(configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None) -> Any:
        whole = sized(configurator, budget_bytes, cap_tokens=cap_tokens)
        if configurator.is_draft_worker:
            return whole
        requests, of_token = running_requests(configurator), configurator.dflash_draft_cell_size_per_token
        pool.rings, pool.why_whole = None, _obstacle(configurator, requests, of_token)
        if requests is None or of_token is None or pool.why_whole is not None:
            return whole
        rings = shape.rings(requests)
        if rings * shape.size >= whole.max_total_num_tokens:
            pool.why_whole = f"{rings} rings of {shape.size} tokens would not be smaller"
            return whole
        pool.rings = rings
        configurator.dflash_draft_cell_size_per_token = _LEAST
        return sized(configurator, budget_bytes - rings * shape.size * of_token, cap_tokens=cap_tokens)

    replace("draft-pool", KVCacheConfigurator, config_from_budget)
    return pool


def price_groups(full: int, sliding: int) -> None:
    """Before the target's pools are sized, for a draft with this many layers at full and at sliding slots: SGLang
    prices all of them at full slots."""
    sized = KVCacheConfigurator.config_from_budget

    def config_from_budget(configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None) -> Any:
        of_token = configurator.dflash_draft_cell_size_per_token
        if configurator.is_draft_worker or not configurator.is_hybrid_swa or of_token is None:
            return sized(configurator, budget_bytes, cap_tokens=cap_tokens)
        of_layer = of_token // (full + sliding)
        fixed = SWARequestCapPoolConfigurator.is_applicable(configurator)
        share = 0.0 if fixed else get_schedule().swa_full_tokens_ratio  # sliding slots by full slot
        configurator.dflash_draft_cell_size_per_token = math.ceil(of_layer * (full + share * sliding))
        try:
            if fixed:
                slots = sized(configurator, budget_bytes).swa_max_total_num_tokens
                budget_bytes -= slots * sliding * of_layer
            return sized(configurator, budget_bytes, cap_tokens=cap_tokens)
        finally:
            configurator.dflash_draft_cell_size_per_token = of_token

    replace("draft-pool", KVCacheConfigurator, config_from_budget)


def running_requests(configurator: Any) -> int | None:
    """The most that a rank will run, as SGLang bounds them before it knows how many tokens fit."""
    asked = get_schedule().max_running_requests
    if asked is None:
        return None
    requests = max(1, asked // configurator.attn_dp_size)
    if configurator.mambaish_config is None:
        return requests
    return min(requests, get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio())


def _obstacle(configurator: Any, requests: int | None, of_token: int | None) -> str | None:
    if configurator.post_capture_kv_active:
        return "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING sizes the pools after the graphs"
    if requests is None:
        return "--max-running-requests is unset"
    if of_token is None:
        return "SGLang cannot tell the draft's bytes of a token"
    return None
