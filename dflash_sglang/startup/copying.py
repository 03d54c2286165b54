"""Whether a launch proposes copies of a request's own text, and of how many rows."""

from __future__ import annotations

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig
from dflash_sglang.sglang_names.scheduler import SIMULATE_ACC_LEN, get_disagg, get_memory
from dflash_sglang.startup.facts import Problem

RENAMED = "with KV pools that rename slots"
CHAINS = {32: 4, 64: 2}  # rows of a request that are verified at once, beyond blocks: the most requests of a step


def why_no_copies(config: PluginConfig, spec: DraftSpec | MtpSpec) -> str | None:
    """Why this launch of a draft copies nothing; None if it copies as far as `config.copy` says."""
    if config.copy == "off":
        return 'copy is "off"'
    if isinstance(spec, MtpSpec):
        return "no test copies with multi-token-prediction layers"
    if SIMULATE_ACC_LEN > 0:
        return "acceptance is forced, whatever is proposed"
    if get_disagg().disaggregation_mode == "prefill":
        return "another server decodes"
    if get_memory().enable_hierarchical_cache:
        return "--enable-hierarchical-cache brings KV without its tokens"
    return None


def chains_of(config: PluginConfig, spec: DraftSpec | MtpSpec, block_size: int) -> dict[int, int]:
    """Those of CHAINS that this launch may verify: of more rows than a block."""
    if config.copy == "block" or why_no_copies(config, spec) is not None:
        return {}
    return {rows: requests for rows, requests in CHAINS.items() if rows > block_size}


def more_rows_problem(reason: str) -> Problem:
    """Of a launch that is to verify more rows of a request than a block, and cannot."""
    return Problem(f"{CONFIG_ENV} copy", 64, f"'block', because {reason}", "Set it to 'block'.")


def renamed_slots_problem(copy: str | int) -> Problem:
    """Of a launch whose KV pools rename the slots of req_to_token, so that a slot names no token; copy: as set."""
    return Problem(f"{CONFIG_ENV} copy", copy, f"'off' {RENAMED}", "Leave it out.")
