"""DFlash2Spec: what a DFlash2 checkpoint's config.json adds to a plain draft's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, as_int, shown
from dflash_sglang.checkpoint.speculators import ALGORITHM, DFLASH2, is_speculators

DFLASH2_ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
"""Names under which checkpoints declare one and the same model."""

MAX_CANDIDATES = 32
"""Candidates per position that the kernel of the selector's walk holds in registers."""
MAX_TAPS = 16
"""Taps that the kernel of the convolution unrolls."""


@dataclass(frozen=True)
class ConvolutionSpec:
    """A grouped dynamic convolution over the rows of a block: ``taps`` rows, its own and the ones before;
    ``group_size`` neighbouring channels share the dynamic part of their coefficients."""

    taps: int
    group_size: int


@dataclass(frozen=True)
class DFlash2Spec:
    """``convolution``: around attention and MLP of every layer, or None. ``selector_rank``: width of the
    selector's codebooks. ``selector_top_k``: candidates per position. What shapes embeddings and logits is in the
    draft's VocabularySpec.
    """

    convolution: ConvolutionSpec | None
    selector_rank: int
    selector_top_k: int


def is_dflash2(config: Mapping[str, Any]) -> bool:
    """Whether a raw config.json declares a DFlash2 draft: by its algorithm in the speculators format, else by its
    first architecture."""
    if is_speculators(config):
        return bool(config.get(ALGORITHM) == DFLASH2)
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in DFLASH2_ARCHITECTURES


def dflash2(fields: Fields, hidden_size: int, vocab_size: int) -> DFlash2Spec:
    """Raises DraftConfigError for a field that is missing, malformed or not servable."""
    rank, top_k = _both(fields, "selector_rank", "selector_top_k", "the candidate selector")
    expected = min(MAX_CANDIDATES, vocab_size)
    if top_k > expected:
        raise DraftConfigError(
            fields.draft("selector_top_k")[0],
            top_k,
            f"at most {expected} candidates per position",
            "Correct selector_top_k in the draft's config.json, or serve a checkpoint trained with fewer.",
        )
    fields.check_whole_vocabulary(vocab_size, "the selector's codebooks hold every token", "DFlash2")
    return DFlash2Spec(_convolution(fields, hidden_size), selector_rank=rank, selector_top_k=top_k)


def _convolution(fields: Fields, hidden_size: int) -> ConvolutionSpec | None:
    kernel_size, group_size = fields.draft("conv_kernel_size"), fields.draft("conv_group_size")
    if not kernel_size[1] and not group_size[1]:
        return None
    spec = ConvolutionSpec(*_both(fields, "conv_kernel_size", "conv_group_size", "a convolution"))
    if spec.taps > MAX_TAPS:
        raise DraftConfigError(kernel_size[0], spec.taps, f"at most {MAX_TAPS} taps")
    if hidden_size % spec.group_size:
        raise DraftConfigError(
            group_size[0],
            spec.group_size,
            f"a divisor of hidden_size={hidden_size}",
            f"Correct {group_size[0]} or hidden_size in the draft's config.json.",
        )
    return spec


def _both(fields: Fields, first: str, second: str, whose: str) -> tuple[int, int]:
    """Two sizes of which a draft has neither without the other."""
    found = [fields.draft(first), fields.draft(second)]
    for (field, value), (other, beside) in (found, reversed(found)):
        if not value:
            field = field if value is not None else f"dflash_config.{field}"
            raise DraftConfigError(
                field,
                value,
                f"its value beside {other}={shown(beside)}: {whose} has both",
                f"Add {field} (the one it was trained with) to the draft's config.json.",
            )
    return as_int(found[0], 1), as_int(found[1], 1)
