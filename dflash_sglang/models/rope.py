"""The draft's rotary embedding: SGLang's tables, with every scaling's parameters as transformers reads them."""

from __future__ import annotations

import math
from typing import Any

from sglang.srt.layers.rotary_embedding import RotaryEmbedding, get_rope

from dflash_sglang.checkpoint import DraftSpec


def draft_rope(spec: DraftSpec) -> RotaryEmbedding:
    """One module per spec and dtype, shared by the layers; `_ensure_cos_sin_cache_length` extends its table."""
    return get_rope(
        spec.head_dim,
        rotary_dim=spec.rope.rotary_dim,
        max_position=spec.max_position_embeddings,
        base=spec.rope.theta,
        is_neox_style=spec.rope.is_neox,
        rope_scaling=None if spec.rope.scaling is None else _as_sglang_reads(spec.rope.scaling),
    )


def _as_sglang_reads(scaling: dict[str, Any]) -> dict[str, Any]:
    """The scaling in the terms of `get_rope`."""
    if scaling["rope_type"] in ("llama3", "proportional"):
        return scaling
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        # SGLang's own linear table is extended unscaled. Of llama3's frequencies those whose wavelength exceeds
        # the original length are divided by the factor: with a length of 1, all of them.
        one = dict(original_max_position_embeddings=1, low_freq_factor=1.0, high_freq_factor=1.0)
        return {"rope_type": "llama3", "factor": factor, **one}
    yarn = {**scaling, "factor": factor}
    magnitude = yarn.pop("attention_factor", None)
    if magnitude is not None or not (yarn.get("mscale") and yarn.get("mscale_all_dim")):
        yarn.pop("mscale", None)
        yarn.pop("mscale_all_dim", None)
    if magnitude is not None:
        # SGLang multiplies attn_factor with the magnitude that it derives from the factor.
        yarn["attn_factor"] = magnitude / (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
    return yarn
