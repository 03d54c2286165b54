"""Grouped dynamic convolutions around attention and MLP of DFlash2 drafts.

A layer of a plain draft is x + attention(norm(x)), then x + mlp(norm(x)). Here each of the two sublayers f has a
convolution of its own on both sides:

    u = norm(x)                                                     [T, hidden]
    d = kernel_projection u                                         [T, 2, taps, groups]
    y = conv(f(conv(u, base_kernel[0] + d[:, 0])), base_kernel[1] + d[:, 1])
    x = x + y

`base_kernel` is [2, taps, hidden], d is shared by the hidden / groups channels of a group, and both sides of f
take their d from u, before anything is convolved. The convolution (`kernels/block/grouped_conv.py`) is depthwise
over the rows of one block: tap 0 is the row itself, tap k the k-th row before it, zero before the block's first
row (the anchor's), which thus sees itself alone and never the context. Context rows go straight from `fc` and
`hidden_norm` to the K and V projections, as in a plain draft: no convolution touches them, while the block's own
keys and values are those of convolved rows. A block that is served narrower than trained is convolved within the
served width.

Kernels are summed in float32 from the parameters' dtype and rounded once per convolution. Under tensor parallelism
rows are whole on every rank between the sublayers, and so are the convolutions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.family_specs import ConvolutionSpec
from dflash_sglang.kernels.block.grouped_conv import grouped_conv
from dflash_sglang.models.layers import DraftLayer, Quantisation, of_checkpoint

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class GroupedConvolution(nn.Module):
    """The convolutions before and after one sublayer. ``block_size``: rows of a served block."""

    def __init__(
        self, spec: ConvolutionSpec, hidden_size: int, block_size: int,
        quant_config: Quantisation, prefix: str,
    ) -> None:  # fmt: skip
        super().__init__()
        self.block_size = block_size
        self.taps, self.groups = spec.taps, hidden_size // spec.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, spec.taps, hidden_size), requires_grad=False)
        rows, prefix = 2 * spec.taps * self.groups, f"{prefix}.kernel_projection"
        self.kernel_projection = ReplicatedLinear(
            hidden_size, rows, bias=False, quant_config=quant_config, prefix=prefix
        )

    def before(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [T, hidden], the sublayer's input -> (its convolution, the dynamic kernel [T, taps, groups] of the
        convolution after the sublayer)."""
        projected, _ = self.kernel_projection(rows)
        dynamic = projected.view(-1, 2, self.taps, self.groups)
        return grouped_conv(rows, dynamic[:, 0], self.base_kernel[0], self.block_size), dynamic[:, 1]

    def after(self, rows: Tensor, dynamic: Tensor) -> Tensor:
        """rows [T, hidden], the sublayer's output, with the kernel that `before` gave -> [T, hidden]."""
        return grouped_conv(rows, dynamic, self.base_kernel[1], self.block_size)


class ConvolvedLayer(DraftLayer):
    """A decoder layer with convolutions around both of its sublayers."""

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: Quantisation, prefix: str) -> None:
        super().__init__(spec, layer_id, quant_config, prefix)
        assert spec.convolution is not None
        shape = (spec.convolution, spec.hidden_size, spec.draft_rows(spec.block_size))
        quant_config = of_checkpoint(quant_config, spec)
        self.attention_conv = GroupedConvolution(*shape, quant_config, f"{prefix}.attention_conv")
        self.mlp_conv = GroupedConvolution(*shape, quant_config, f"{prefix}.mlp_conv")

    def attention(self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        hidden_states, dynamic = self.attention_conv.before(hidden_states)
        return self.attention_conv.after(super().attention(positions, hidden_states, forward_batch), dynamic)

    def feed_forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states, dynamic = self.mlp_conv.before(hidden_states)
        return self.mlp_conv.after(super().feed_forward(hidden_states), dynamic)

    def serve_rows(self, rows: int) -> None:
        """How many rows a served block has; before the first forward."""
        self.attention_conv.block_size = self.mlp_conv.block_size = rows
