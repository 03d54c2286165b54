"""MiMo-V2's multi-token-prediction layers: all read the target's hidden states, and its head proposes.

The hidden states are those after the final norm. A row's keys and values follow from a token ahead of it, as in a
chain, so the same windows repair them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sglang.srt.layers.layer_boundary import layer_stack
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.model_loader.weight_utils import sharded_weight_loader
from sglang.srt.models.mimo_v2_nextn import MiMoV2MTPLayer
from torch import nn

from dflash_sglang.models.mtp.base import MtpDraftModel, MtpLayer


class MimoV2Layer(MtpLayer):
    def __init__(self, config: Any, layer: int, prefix: str) -> None:
        with layer_stack():
            block = MiMoV2MTPLayer(config, layer, prefix=f"{prefix}block")
        super().__init__(block, RMSNorm, config.hidden_size, config.layernorm_epsilon, prefix)
        sinks = self.block.self_attn.attention_sink_bias
        if sinks is not None:
            sinks.weight_loader = sharded_weight_loader(0)


class MiMoV2MTPDraftModel(MtpDraftModel):
    """Layers that read nothing of each other."""

    layer_class: ClassVar[type[nn.Module]] = MimoV2Layer
    renamed: ClassVar[Mapping[str, str]] = {
        "final_layernorm.": "head_norm.",
        "pre_mlp_layernorm.": "block.post_attention_layernorm.",
    }


EntryClass = [MiMoV2MTPDraftModel]
