"""What was read of a draft, in words: a wrong reading of its layers or its RoPE shows in the start-up line."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_sglang.checkpoint import DraftSpec
    from dflash_sglang.checkpoint.mtp import MtpSpec


def layers_read(spec: DraftSpec | MtpSpec) -> str:
    """Kind, window and causality of every layer, equal neighbours as one: `0-4 sliding(4096) causal, 5 full not
    causal`. The window is in tokens and counts the query's own."""
    parts, start = [], 0
    for layer, equal in itertools.groupby(spec.layers):
        last = start + len(list(equal)) - 1
        numbers = f"{start}" if last == start else f"{start}-{last}"
        kind = layer.kind.removesuffix("_attention") + (f"({layer.window})" if layer.window else "")
        parts.append(f"{numbers} {kind} {'causal' if layer.causal else 'not causal'}")
        start = last + 1
    return ", ".join(parts)


def rope_read(spec: DraftSpec) -> str:
    """Base, rotated dimensions and scaling, the same in every layer: `theta 10000, 64 of 128 dimensions`."""
    rope = spec.rope
    scaling = rope.scaling or {}
    arguments = [f" {key} {value}" for key, value in scaling.items() if key != "rope_type"]
    parts = [
        f"theta {rope.theta:.10g}",
        f"{rope.rotary_dim} of {spec.head_dim} dimensions",
        *([] if rope.is_neox else ["interleaved"]),
        *([scaling["rope_type"] + "".join(arguments)] if scaling else []),
    ]
    return ", ".join(parts)
