"""The decoder layer of a DFlash draft on SGLang's layers: attention, its RoPE, MLP and their residual stream."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, get_rope
from sglang.srt.model_loader.weight_utils import sharded_weight_loader
from sglang.srt.utils.common import set_weight_attrs
from torch import Tensor, nn

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.draft_spec import SwigluClamp
from dflash_sglang.sglang_names.scheduler import ForwardBatch, swiglu_oai_split, table_qk_norm_rope_

Quantisation: TypeAlias = QuantizationConfig | None


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


def rms_norm(spec: DraftSpec, size: int) -> RMSNorm | GemmaRMSNorm:
    """A norm of rows of `size` channels, as the checkpoint has them all."""
    return (GemmaRMSNorm if spec.gemma_norms else RMSNorm)(size, eps=spec.rms_norm_eps)


def of_checkpoint(quant_config: Quantisation, spec: DraftSpec) -> Quantisation:
    """The quantisation of small projections: that of a quantised checkpoint, which names those that it leaves out.
    Quantising while loading leaves them alone: they are few weights, and shape every row."""
    return None if spec.quantization is None else quant_config


class DraftAttention(nn.Module):
    """Attention of one draft layer, for the block's rows and for the keys and values of context rows.

    Keys of both kinds are finished (k_norm, RoPE) by the same arithmetic with the same roundings: a Triton
    kernel in place where `no_table_kernel` is None, the two modules elsewhere. Sizes are those of this TP rank.
    """

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: Quantisation, prefix: str) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.value_scale = spec.attention_value_scale
        hidden, heads, bias = spec.hidden_size, (spec.num_heads, spec.num_kv_heads), spec.attention_bias
        self.qkv_proj = QKVParallelLinear(
            hidden, self.head_dim, *heads, bias=bias, quant_config=quant_config, prefix=f"{prefix}.qkv_proj"
        )
        self.num_heads: int = self.qkv_proj.num_heads
        self.num_kv_heads: int = self.qkv_proj.num_kv_heads
        self.q_size = self.num_heads * spec.head_dim
        self.kv_size = self.num_kv_heads * spec.head_dim
        columns = spec.num_heads * spec.head_dim
        self.o_proj = RowParallelLinear(
            columns, hidden, bias=bias, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        self.q_norm = rms_norm(spec, spec.head_dim)
        self.k_norm = rms_norm(spec, spec.head_dim)
        self.attention_sink_bias = _sinks(self.num_heads) if spec.attention_sinks else None
        self.rotary_emb = draft_rope(spec)
        self.no_table_kernel = _no_table_kernel(self.rotary_emb, spec)
        layer = spec.layers[layer_id]
        # SGLang counts a window's keys to the left of the query, the checkpoint counts the query too.
        window_left = -1 if layer.window is None else layer.window - 1
        self.attn = RadixAttention(
            self.num_heads,
            spec.head_dim,
            spec.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            sliding_window_size=window_left,
            attn_type=AttentionType.DECODER if layer.causal else AttentionType.ENCODER_ONLY,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )
        self.attn.sliding_window_size = window_left  # the constructor reads a window_left of 0 as "none"

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """positions [T], hidden_states [T, hidden] of the block's rows -> [T, hidden]."""
        if hidden_states.shape[0] == 0:  # IDLE: nothing to attend to, but the all-reduce of o_proj is due
            attended = hidden_states.new_empty(0, self.q_size)
        else:
            attended = self._attend(positions, hidden_states, forward_batch)
        output, _ = self.o_proj(attended)
        return output

    def _attend(self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self._uses_table_kernel(qkv):
            self._norm_rope_in_place(qkv, positions, self.num_heads)
        else:
            q, k = self.rotary_emb(positions, self._normed(self.q_norm, q), self._normed(self.k_norm, k))
        sinks = {} if self.attention_sink_bias is None else {"sinks": self.attention_sink_bias}
        return self.attn(q, k, self.scaled_values(v), forward_batch, **sinks)

    def finished_keys(self, k: Tensor, positions: Tensor) -> Tensor:
        """k_norm and RoPE on projected keys [T, kv_size] (rows may be strided; may be changed in place)."""
        if self._uses_table_kernel(k):
            self._norm_rope_in_place(k, positions, num_q_heads=0)
            return k
        k = self._normed(self.k_norm, k)
        _, k = self.rotary_emb(positions, torch.empty_like(k), k)
        return k

    def scaled_values(self, v: Tensor) -> Tensor:
        return v if self.value_scale is None else v * self.value_scale

    def _normed(self, norm: RMSNorm | GemmaRMSNorm, x: Tensor) -> Tensor:
        return norm(x.reshape(-1, self.head_dim)).view(x.shape)

    def _uses_table_kernel(self, x: Tensor) -> bool:
        if self.no_table_kernel is not None or not x.is_cuda:
            return False
        return x.dtype == self.k_norm.weight.dtype == torch.bfloat16

    def _norm_rope_in_place(self, qk: Tensor, positions: Tensor, num_q_heads: int) -> None:
        """qk [T, >= (num_q_heads + num_kv_heads) * head_dim]: query heads, then key heads, then anything."""
        tables = self.q_norm.weight, self.k_norm.weight, self.rotary_emb.cos_sin_cache
        sizes = num_q_heads, self.num_kv_heads, self.head_dim
        table_qk_norm_rope_(qk, positions, *tables, *sizes, self.k_norm.variance_epsilon)


def _sinks(num_heads: int) -> nn.Parameter:
    """[num_heads of this rank]: what the softmax of each head takes into its sum beside the keys' scores."""
    sinks = nn.Parameter(torch.zeros(num_heads), requires_grad=False)
    set_weight_attrs(sinks, {"weight_loader": sharded_weight_loader(0, parallel_group="tp")})
    return sinks


def _no_table_kernel(rotary: nn.Module, spec: DraftSpec) -> str | None:
    """Why the kernels that norm and rotate by one cos/sin row per position do not fit, or None. They scale by the
    weight itself and rotate whole heads, halves against each other."""
    if spec.gemma_norms:
        return "the draft's norms scale by 1 + weight"
    plain = (
        isinstance(rotary, RotaryEmbedding)
        and type(rotary).forward_cuda is RotaryEmbedding.forward_cuda
        and rotary.position_start == 0
        and rotary.is_neox_style
        and rotary.rotary_dim == spec.head_dim
        and spec.head_dim & (spec.head_dim - 1) == 0
    )
    return None if plain else "the draft's RoPE is not a plain rotation of whole heads"


class ClampedSwiglu(nn.Module):
    """gate_up [T, 2 * n], gates before ups -> [T, n]; computed in float32."""

    def __init__(self, clamp: SwigluClamp) -> None:
        super().__init__()
        self.alpha, self.limit = clamp.alpha, clamp.limit

    def forward(self, gate_up: Tensor) -> Tensor:
        if gate_up.is_cuda and len(gate_up):
            return swiglu_oai_split(gate_up, self.alpha, 1.0, self.limit)
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * torch.sigmoid(self.alpha * gate) * (up + 1)).to(gate_up.dtype)


class DraftMLP(nn.Module):
    """SwiGLU, clamped or not."""

    def __init__(self, spec: DraftSpec, quant_config: Quantisation, prefix: str) -> None:
        super().__init__()
        hidden, size = spec.hidden_size, spec.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [size, size], bias=False, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            size, hidden, bias=False, quant_config=quant_config, prefix=f"{prefix}.down_proj"
        )
        self.act_fn = SiluAndMul() if spec.swiglu_clamp is None else ClampedSwiglu(spec.swiglu_clamp)

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(hidden_states)
        output, _ = self.down_proj(self.act_fn(gate_up))
        return output


class DraftLayer(nn.Module):
    """Pre-norm decoder layer whose residual additions are fused into the next norm.

    0 rows (an IDLE batch) issue the collectives of any other batch and write nothing.
    """

    attention_class = DraftAttention

    def __init__(self, spec: DraftSpec, layer_id: int, quant_config: Quantisation, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = rms_norm(spec, spec.hidden_size)
        self.self_attn = self.attention_class(spec, layer_id, quant_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = rms_norm(spec, spec.hidden_size)
        self.mlp = DraftMLP(spec, quant_config, f"{prefix}.mlp")

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, forward_batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """hidden_states and residual [T, hidden]; the layer's output is the sum of the two returned."""
        hidden_states, residual = self.entered(hidden_states, residual)
        hidden_states = self.attention(positions, hidden_states, forward_batch)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.feed_forward(hidden_states), residual

    def entered(self, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `forward` -> normed rows for the first sublayer, and the residual that its output is added to."""
        if residual is None:
            return self.input_layernorm(hidden_states), hidden_states
        normed, residual = self.input_layernorm(hidden_states, residual)
        return normed, residual

    def attention(self, positions: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """The first sublayer: normed rows [T, hidden] -> what is added to the residual."""
        return self.self_attn(positions, hidden_states, forward_batch)

    def feed_forward(self, hidden_states: Tensor) -> Tensor:
        """The second sublayer: normed rows [T, hidden] -> what is added to the residual."""
        return self.mlp(hidden_states)
