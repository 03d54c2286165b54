"""LagunaSpec: what a Laguna checkpoint's config.json adds to a plain draft's."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields

# Values of `gating`: one gate for each head, one for each channel, none.
_PER_HEAD, _PER_ELEMENT, _DISABLED = (True, "per-head"), ("per-element",), (False, None, "disabled")


@dataclass(frozen=True)
class LagunaSpec:
    """Of a draft that norms each captured feature, and the context rows once more in each layer.

    ``gates``: numbers that scale what a head attended to, 1 or head_dim; 0 without them.
    """

    gates: int


def laguna(fields: Fields, head_dim: int) -> LagunaSpec:
    """Raises DraftConfigError for a `gating` of another kind."""
    gating = fields.text.get("gating", True)  # as transformers' Laguna has it
    for values, gates in ((_PER_HEAD, 1), (_PER_ELEMENT, head_dim), (_DISABLED, 0)):
        if (gating is None or isinstance(gating, bool | str)) and gating in values:
            return LagunaSpec(gates)
    raise DraftConfigError("gating", gating, "per-head, per-element, disabled, true or false")
