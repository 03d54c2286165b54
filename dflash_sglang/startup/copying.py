"""Whether a launch proposes copies of a request's own text."""

from __future__ import annotations

from dflash_sglang.settings.plugin_config import CONFIG_ENV, PluginConfig, Texts
from dflash_sglang.sglang_names.scheduler import get_disagg, get_memory
from dflash_sglang.startup.draft_kv import needs_whole_pool
from dflash_sglang.startup.facts import Problem


def copies_of(config: PluginConfig) -> str:
    """`copies_in_words` of this launch."""
    without_tokens = needs_whole_pool(get_memory().enable_hierarchical_cache, get_disagg().disaggregation_mode)
    return copies_in_words(config, without_tokens)


def copies_in_words(config: PluginConfig, without_tokens: str | None) -> str:
    """ "block", "64" rows, or "off" and why. without_tokens: the flag of this launch by which KV comes without its
    tokens (`needs_whole_pool`)."""
    if config.copy == "off":
        return 'off (copy is "off")'
    if not isinstance(config.simulated_acceptance, Texts | None):
        return "off (acceptance is forced, whatever is proposed)"
    if without_tokens is not None:
        return f"off ({without_tokens} brings KV without its tokens)"
    return str(config.copy)


def beyond_blocks_problem(reason: str) -> Problem:
    """Of a launch that cannot verify more rows than a block. reason: a clause."""
    return Problem(f"{CONFIG_ENV} copy", 64, f"'block', because {reason}", "Set it to 'block'.")


def renamed_slots_problem(copy: str | int) -> Problem:
    """Of a launch whose KV pools rename the slots of req_to_token, so that a slot names no token; copy: as set."""
    return Problem(f"{CONFIG_ENV} copy", copy, "'off' with KV pools that rename slots", "Leave it out.")
