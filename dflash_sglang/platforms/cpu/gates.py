"""Torch forms of SGLang's pointwise kernels around gated delta nets: split projections, gates, gated norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus


def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """a, b [tokens, v_heads] -> log decay and beta, each [1, tokens, v_heads] float32."""
    return (-A_log.float().exp() * softplus(a.float() + dt_bias.float()))[None], b.float().sigmoid()[None]


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[tokens, q + k + v + z] and [tokens, b + a] -> qkv, z [tokens, num_heads_v, head_v], b, a."""
    v_size = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([mixed_qkvz.shape[1] - v_size, v_size], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of Qwen3-Next, whose q, k, v, z and b, a lie key head after key head."""
    shared = num_heads_v // num_heads_qk
    by_head = mixed_qkvz.view(len(mixed_qkvz), num_heads_qk, -1)
    q, k, v, z = by_head.split([head_qk, head_qk, shared * head_v, shared * head_v], dim=-1)
    b, a = mixed_ba.view(len(mixed_ba), num_heads_qk, -1).split(shared, dim=-1)
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
    return qkv, z.reshape(-1, num_heads_v, head_v), b.flatten(1), a.flatten(1)


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, activation: str, eps: float, **_: Any
) -> Tensor:
    return layernorm_fn(x, weight, bias, g, eps, activation)


def layernorm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, eps: float, activation: str = "swish", **_: Any
) -> Tensor:
    """RMS norm of x, gated with z."""
    gate = {"swish": silu, "silu": silu, "sigmoid": torch.sigmoid}[activation]
    return (rms_norm(x.float(), weight.shape, weight.float(), eps) * gate(z.float())).to(x.dtype)


def fused_sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False) -> Tensor:
    """attn_output [tokens, heads * head_dim], gate the same or [tokens, heads, head_dim]."""
    return attn_output * gate.reshape(attn_output.shape).sigmoid()


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Adds the shared expert's output [tokens, hidden], gated, to that of the routed experts, which is written."""
    final_hidden_states += (hidden_states @ gate_weight).sigmoid()[:, None] * shared_output
