"""Whether a launch proposes copies of a request's own text, and of how many rows."""

from __future__ import annotations

from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig, Texts
from dflash_sglang.sglang_names.scheduler import get_disagg, get_memory
from dflash_sglang.startup.draft_kv import needs_whole_pool
from dflash_sglang.startup.facts import Problem

CHAINS = {32: 4, 64: 2}  # rows of a request that are verified at once, beyond blocks: the most requests of a step


def why_no_copies(config: PluginConfig) -> str | None:
    """Why this launch copies nothing; None if it copies as far as `config.copy` says."""
    if config.copy == "off":
        return 'copy is "off"'
    if not isinstance(config.simulated_acceptance, Texts | None):
        return "acceptance is forced, whatever is proposed"
    flag = needs_whole_pool(get_memory().enable_hierarchical_cache, get_disagg().disaggregation_mode)
    return None if flag is None else f"{flag} brings KV without its tokens"


def chains_of(config: PluginConfig, block_size: int) -> dict[int, int]:
    """Those of CHAINS that this launch may verify: of more rows than a block."""
    if config.copy != 64 or why_no_copies(config) is not None:
        return {}
    return {rows: requests for rows, requests in CHAINS.items() if rows > block_size}


def renamed_slots_problem(copy: str | int) -> Problem:
    """Of a launch whose KV pools rename the slots of req_to_token, so that a slot names no token; copy: as set."""
    return Problem(f"{CONFIG_ENV} copy", copy, "'off' with KV pools that rename slots", "Leave it out.")
