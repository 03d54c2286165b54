"""MiMo-V2's multi-token-prediction layers: all read the target's hidden states, and its head proposes.

The hidden states are those after the final norm. A row's keys and values follow from a token ahead of it, as in a
chain, so the same windows repair them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sglang.srt.layers.layer_boundary import layer_stack
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.model_loader.weight_utils import sharded_weight_loader
from sglang.srt.models.mimo_v2_nextn import MiMoV2MTPLayer
from torch import nn

from dflash_sglang.models.head.target_head import TargetHead, find_head
from dflash_sglang.models.mtp.step3p5 import MtpLayer, Step3p5MTPDraftModel


class MimoV2Layer(MtpLayer):
    def __init__(self, config: Any, layer: int, prefix: str) -> None:
        nn.Module.__init__(self)
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = ReplicatedLinear(2 * hidden, hidden, bias=False, prefix=f"{prefix}eh_proj")
        with layer_stack():
            self.block = MiMoV2MTPLayer(config, layer, prefix=f"{prefix}block")
        self.head_norm = RMSNorm(hidden, eps)
        sinks = self.block.self_attn.attention_sink_bias
        if sinks is not None:
            sinks.weight_loader = sharded_weight_loader(0)


class MiMoV2MTPDraftModel(Step3p5MTPDraftModel):
    """Layers that read nothing of each other."""

    layer_class: ClassVar[type[nn.Module]] = MimoV2Layer
    beside: ClassVar[Mapping[str, str]] = {
        "enorm.": "enorm.",
        "hnorm.": "hnorm.",
        "eh_proj.": "eh_proj.",
        "final_layernorm.": "head_norm.",
        "pre_mlp_layernorm.": "block.post_attention_layernorm.",
    }
    has_own_head = False

    def _find_heads(self, target_model: nn.Module) -> list[TargetHead]:
        return [TargetHead(find_head(target_model))] * self.spec.num_layers


EntryClass = [MiMoV2MTPDraftModel]
