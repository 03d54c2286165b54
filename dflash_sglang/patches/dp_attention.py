"""Data-parallel attention under DFLASH without what SGLang asks for it: a GPU and --enable-dp-lm-head."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sglang.srt.arg_groups import speculative_hook

from dflash_sglang.patches.apply import replaced


def allowed() -> AbstractContextManager[None]:
    """While SGLang checks the arguments of a DFLASH launch: those conditions are of its own worker."""
    return replaced("dp-attention", speculative_hook, lambda cfg: False)
