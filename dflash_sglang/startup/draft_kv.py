"""Whether the draft's keys and values can be kept in rings: a window of each request, and no more."""

from __future__ import annotations

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.kernels.context.rings import RingShape
from dflash_sglang.settings.plugin_config import PluginConfig


def ring_shape(
    spec: DraftSpec,
    config: PluginConfig,
    block: int,
    page_size: int,
    window: int | None,
    sinks: int | None,
    whole_for: str | None,
) -> RingShape | str:
    """The rings of a launch, or why its draft has a pool as large as the target's.

    block: the widest. window, sinks: --speculative-draft-window-size and --speculative-draft-sink-size. whole_for:
    the flag of this launch that needs the whole pool (`needs_whole_pool`).
    """
    if config.draft_kv == "whole":
        return 'draft_kv is "whole"'
    if whole_for is not None:
        return f"{whole_for} takes the draft's rows by the target's slots"
    if window is not None and sinks:
        return "--speculative-draft-sink-size keeps the first tokens of every request"
    if window is None:
        windows = [layer.window for layer in spec.layers]
        if None in windows:
            return f"layer {windows.index(None)} of the draft sees the whole context"
        window = max(own for own in windows if own is not None)
    return RingShape.fitting(window, page_size, block, max(config.width.trees, default=0))


def needs_whole_pool(hierarchical_cache: bool, disaggregation_mode: str | None) -> str | None:
    """The flag of a launch that needs the draft's rows at the target's slots, or None."""
    if hierarchical_cache:
        return "--enable-hierarchical-cache"
    if disaggregation_mode not in (None, "null"):
        return f"--disaggregation-mode {disaggregation_mode}"
    return None
