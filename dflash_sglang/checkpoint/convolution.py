"""ConvolutionSpec: the convolutions around attention and MLP of a DFlash2 draft."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_sglang.checkpoint.fields import DraftConfigError, Fields, both_sizes

MAX_TAPS = 16
"""Taps that the kernel of the convolution unrolls."""


@dataclass(frozen=True)
class ConvolutionSpec:
    """A grouped dynamic convolution over the rows of a block: ``taps`` rows, its own and the ones before;
    ``group_size`` neighbouring channels share the dynamic part of their coefficients."""

    taps: int
    group_size: int


def convolution(fields: Fields, hidden_size: int) -> ConvolutionSpec | None:
    """Of every layer, or None. Raises DraftConfigError for a field that is missing, malformed or not servable."""
    kernel_size, group_size = fields.draft("conv_kernel_size"), fields.draft("conv_group_size")
    if not kernel_size[1] and not group_size[1]:
        return None
    spec = ConvolutionSpec(*both_sizes(fields, "conv_kernel_size", "conv_group_size", "a convolution"))
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
