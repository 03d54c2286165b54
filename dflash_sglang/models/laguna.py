"""Laguna drafts: a norm for each captured feature, a gate on attention, context rows that each layer norms.

With f_j the captured features of a token and h the input of a layer's attention, after its `input_layernorm`:

    c = hidden_norm(fc [aux_hidden_norms_0 f_0; aux_hidden_norms_1 f_1; ...])       context row
    k, v of layer l = k_proj, v_proj of input_layernorm_l(c)
    attention(h) = o_proj(softplus(g_proj h) * attended)                            a gate per head or channel
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear
from torch import Tensor, nn
from torch.nn import functional

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.models.draft import DFlashDraftModel
from dflash_sglang.models.layers import DraftAttention, DraftLayer, Quantisation, of_checkpoint, rms_norm
from dflash_sglang.sglang_names.scheduler import ForwardBatch


class GatedAttention(DraftAttention):
    """Attention whose heads are scaled before `o_proj`. The gate is computed in float32 from its projection on."""

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: Quantisation, prefix: str) -> None:
        super().__init__(spec, layer_id, quant_config, prefix)
        assert spec.laguna is not None
        gates, quant_config = spec.num_heads * spec.laguna.gates, of_checkpoint(quant_config, spec)
        self.g_proj = ColumnParallelLinear(
            spec.hidden_size, gates, bias=False, quant_config=quant_config, prefix=f"{prefix}.g_proj"
        )

    def _attend(self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        gate, _ = self.g_proj(hidden_states)
        attended = super()._attend(positions, hidden_states, forward_batch)
        gate = functional.softplus(gate.float()).to(attended.dtype)
        heads = (len(attended), self.num_heads, -1)
        return (attended.view(heads) * gate.view(heads)).view_as(attended)


class GatedLayer(DraftLayer):
    """A decoder layer of a Laguna draft."""

    attention_class = GatedAttention


class DFlashLagunaForCausalLM(DFlashDraftModel):
    """A Laguna draft; a checkpoint without gates has the layers of a plain one."""

    def __init__(self, config: Any, quant_config: Quantisation = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        hidden_size = self.spec.hidden_size
        self.aux_hidden_norms = nn.ModuleList(rms_norm(self.spec, hidden_size) for _ in range(self.num_features))

    @staticmethod
    def layer_class(spec: DraftSpec) -> type[DraftLayer]:
        assert spec.laguna is not None  # of the architecture in EntryClass
        return GatedLayer if spec.laguna.gates else DraftLayer

    @property
    def context_norms(self) -> list[RMSNorm]:
        return [layer.input_layernorm for layer in self.layers]

    def joined_features(self, features: Tensor) -> Tensor:
        parts = features.chunk(self.num_features, dim=-1)
        normed = [norm(part.contiguous()) for norm, part in zip(self.aux_hidden_norms, parts, strict=True)]
        return torch.cat(normed, dim=-1)


EntryClass = [DFlashLagunaForCausalLM]
