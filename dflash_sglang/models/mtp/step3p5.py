"""Step-3.5's multi-token-prediction layers: a chain, each with its own head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sglang.srt.layers.layer_boundary import layer_stack
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.models.step3p5 import Step3p5DecoderLayer
from torch import nn

from dflash_sglang.models.mtp.base import MtpDraftModel, MtpLayer


class Step3p5Layer(MtpLayer):
    def __init__(self, config: Any, layer: int, prefix: str) -> None:
        with layer_stack():
            block = Step3p5DecoderLayer(config=config, layer_id=layer, prefix=f"{prefix}block")
        super().__init__(block, GemmaRMSNorm, config.hidden_size, config.rms_norm_eps, prefix)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=f"{prefix}lm_head")


class Step3p5MTPDraftModel(MtpDraftModel):
    layer_class: ClassVar[type[nn.Module]] = Step3p5Layer
    renamed: ClassVar[Mapping[str, str]] = {
        "shared_head.norm.": "head_norm.",
        "shared_head.output.": "lm_head.",
    }


EntryClass = [Step3p5MTPDraftModel]
