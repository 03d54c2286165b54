"""DSpark drafts of Gemma 4's layers: each sublayer is normed before and after, and keys are values, too.

With x the rows that enter a layer, s its `layer_scalar`, and c a context row or a row of the block after
`input_layernorm`:

    a = x + post_attention_layernorm(attention(input_layernorm(x)))
    y = s * (a + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(a))))     out
    k = rope(k_norm(k_proj c)),    v = k_proj c / rms(k_proj c)

Scores are not scaled. The MLP is gelu(gate) * up, with the approximation of gelu by tanh.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from sglang.srt.layers.activation import GeluAndMul
from sglang.srt.layers.layernorm import RMSNormWithoutScale
from torch import Tensor, nn

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.models.dspark import DSparkDraftModel
from dflash_sglang.models.layers import DraftAttention, DraftLayer, Quantisation, rms_norm
from dflash_sglang.sglang_names.scheduler import ForwardBatch
from dflash_sglang.startup.facts import LoadError

_KEYS, _VALUES = ".self_attn.k_proj.", ".self_attn.v_proj."


class Gemma4Attention(DraftAttention):
    """`qkv_proj` holds the rows of `k_proj` twice."""

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: Quantisation, prefix: str) -> None:
        super().__init__(spec, layer_id, quant_config, prefix)
        self.v_norm = RMSNormWithoutScale(spec.head_dim, eps=spec.rms_norm_eps)
        self.attn.scaling = 1.0
        self.no_table_kernel = "the draft norms its values"

    def scaled_values(self, v: Tensor) -> Tensor:
        return self._normed(self.v_norm, v)


class Gemma4Layer(DraftLayer):
    """A decoder layer whose sublayers' outputs are normed before they are added, and whose output is scaled."""

    attention_class = Gemma4Attention

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: Quantisation, prefix: str) -> None:
        super().__init__(spec, layer_id, quant_config, prefix)
        self.mlp.act_fn = GeluAndMul()
        self.pre_feedforward_layernorm = rms_norm(spec, spec.hidden_size)
        self.post_feedforward_layernorm = rms_norm(spec, spec.hidden_size)
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, forward_batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        hidden_states, residual = self.entered(hidden_states, residual)
        attended = self.post_attention_layernorm(self.attention(positions, hidden_states, forward_batch))
        hidden_states, residual = self.pre_feedforward_layernorm(attended, residual)
        fed = self.post_feedforward_layernorm(self.feed_forward(hidden_states))
        return fed * self.layer_scalar, residual * self.layer_scalar


class Gemma4DSparkModel(DSparkDraftModel):
    """A DSpark draft of these layers."""

    @staticmethod
    def layer_class(spec: DraftSpec) -> type[DraftLayer]:
        return Gemma4Layer

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(_with_values(weights))


def _with_values(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in weights:
        if _VALUES in name:
            raise LoadError(
                f"draft checkpoint: unexpected tensor {name!r}. Expected none of v_proj: with attention_k_eq_v, "
                "k_proj gives the values. Remove it, or serve another draft."
            )
        yield name, tensor
        if _KEYS in name:
            yield name.replace(_KEYS, _VALUES), tensor


EntryClass = [Gemma4DSparkModel]
