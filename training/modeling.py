"""The DFLASH draft model in plain PyTorch, one module tree with the tensor names of a z-lab checkpoint.

It is written from the published algorithm and shares no code with the served model, so that it can be the
served model's reference. It favours the plain form of each formula over speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

ContextKV = list[tuple[Tensor, Tensor]]
"""Per draft layer: keys (after k_norm and RoPE) and values (scaled), [..., T, kv_heads, head_dim] each."""


@dataclass(frozen=True)
class DraftShape:
    """What the draft's config says, in the terms of this module."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    bias: bool
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    causal: tuple[bool, ...]
    window: int | None
    rope_theta: float
    rotary_dim: int
    is_neox: bool
    value_scale: float

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> DraftShape:
        """Reads a z-lab config (flat fields and ``dflash_config``).

        Raises ValueError for a layer type or a RoPE type that this reference does not implement, and for a
        sliding layer without ``sliding_window``; KeyError for a missing required field.
        """
        nested = config.get("dflash_config") or {}
        layers = int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        types = tuple(config.get("layer_types") or ["full_attention"] * layers)
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown or len(types) != layers:
            raise ValueError(
                f"layer_types={list(types)}: expected {layers} of full_attention or sliding_attention"
            )
        window = config.get("sliding_window")
        if "sliding_attention" in types and window is None:
            raise ValueError("sliding_window is absent: expected a width, because layer_types has sliding layers")
        theta, rotary_dim = _rope(config, head_dim)
        block = nested.get("block_size", config.get("block_size"))
        if block is None:
            raise ValueError("block_size is absent: expected it at the top level or in dflash_config")
        scale = nested.get("attention_value_scale")
        return DraftShape(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            eps=float(config.get("rms_norm_eps", 1e-6)),
            bias=bool(config.get("attention_bias", False)),
            block_size=int(block),
            mask_token_id=int(nested["mask_token_id"]),
            target_layer_ids=tuple(int(i) for i in nested["target_layer_ids"]),
            layer_types=types,
            causal=tuple(_is_causal(config, kind) for kind in types),
            window=None if window is None else int(window),
            rope_theta=theta,
            rotary_dim=rotary_dim,
            is_neox=bool(config.get("rope_is_neox_style", config.get("is_neox_style", True))),
            value_scale=1.0 if scale is None else float(scale),
        )


def _is_causal(config: Mapping[str, Any], kind: str) -> bool:
    nested = config.get("dflash_config") or {}
    if config.get("is_causal") is not None:
        return bool(config["is_causal"])
    if nested.get("causal") is not None:
        return bool(nested["causal"])
    non_causal = config.get("sliding_window_non_causal", nested.get("sliding_window_non_causal", False))
    return kind == "sliding_attention" and not non_causal


def _rope(config: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    """(theta, rotary width); the nested dict wins over the top level, ``rope_dim`` over the factor."""
    nested: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = nested.get("rope_type", nested.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type={kind!r}: the reference implements 'default' only")
    theta = float(nested.get("rope_theta", config.get("rope_theta", 10000.0)))
    factor = float(nested.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    return theta, int(nested.get("rope_dim", int(head_dim * factor)))


def rotate(x: Tensor, positions: Tensor, theta: float, rotary_dim: int, is_neox: bool) -> Tensor:
    """RoPE on the first ``rotary_dim`` channels. x: [..., T, heads, head_dim], positions: [T] or [..., T]."""
    exponent = torch.arange(0, rotary_dim, 2, device=x.device, dtype=torch.float32) / rotary_dim
    angle = positions.to(torch.float32)[..., None, None] * theta**-exponent  # [..., T, 1, rotary_dim / 2]
    cos, sin = angle.cos(), angle.sin()
    turned, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    if is_neox:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: DraftShape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query, bias=shape.bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=shape.bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=shape.bias)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=shape.bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.shape.rope_theta, self.shape.rotary_dim, self.shape.is_neox)

    def keys_values(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """rows: [..., T, hidden] -> k, v: [..., T, kv_heads, head_dim]."""
        split = (self.shape.num_kv_heads, self.shape.head_dim)
        k = self._rotate(self.k_norm(self.k_proj(rows).unflatten(-1, split)), positions)
        return k, self.v_proj(rows).unflatten(-1, split) * self.shape.value_scale

    def forward(
        self, rows: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], bias: Tensor | BlockMask
    ) -> Tensor:
        """rows: [..., Q, hidden], bias: [Q, T + Q] added to the scores, or a mask for it -> [..., Q, hidden]."""
        split = (self.shape.num_heads, self.shape.head_dim)
        q = self._rotate(self.q_norm(self.q_proj(rows).unflatten(-1, split)), positions)
        own_k, own_v = self.keys_values(rows, positions)
        k = torch.cat((context[0].to(q.dtype), own_k), dim=-3)
        v = torch.cat((context[1].to(q.dtype), own_v), dim=-3)
        if isinstance(bias, BlockMask):
            q, k, v = (x.transpose(-3, -2) for x in (q, k, v.to(q.dtype)))
            out: Any = flex_attention(q, k, v, block_mask=bias, enable_gqa=True)
        else:
            groups = self.shape.num_heads // self.shape.num_kv_heads
            q, k, v = (x.transpose(-3, -2) for x in (q, *(x.repeat_interleave(groups, dim=-2) for x in (k, v))))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype).expand(*q.shape[:-1], -1))
        return self.o_proj(out.transpose(-3, -2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.eps)
        self.mlp = MLP(shape)

    def forward(
        self, h: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], bias: Tensor | BlockMask
    ) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), positions, context, bias)
        return h + self.mlp(self.post_attention_layernorm(h))


class DraftModel(nn.Module):
    """State-dict names are the checkpoint's (``fc``, ``hidden_norm``, ``layers.N...``, ``norm``)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.shape = DraftShape.from_config(config)
        shape = self.shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.eps)
        self.layers = nn.ModuleList(DraftLayer(shape, i) for i in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.eps)

    def context_rows(self, features: Tensor) -> Tensor:
        """features: [..., T, n_ids * hidden], in the checkpoint's layer order -> [..., T, hidden]."""
        return self.hidden_norm(self.fc(features))

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """features: [..., T, n_ids * hidden], positions: [T]."""
        rows = self.context_rows(features)
        return [layer.self_attn.keys_values(rows, positions) for layer in self.layers]

    def forward(
        self, embeds: Tensor, positions: Tensor, context: ContextKV, biases: Sequence[Tensor | BlockMask]
    ) -> Tensor:
        """Hidden rows after the final norm, for the target's head.

        embeds: [..., Q, hidden], positions: [Q] or [..., Q], biases: per layer [Q, T + Q], 0 or -inf, or masks
        -> [..., Q, hidden].
        """
        h = embeds
        for layer, kv, bias in zip(self.layers, context, biases, strict=True):
            h = layer(h, positions, kv, bias)
        return self.norm(h)


def attention_biases(
    shape: DraftShape, context_positions: Tensor, positions: Tensor, starts: Tensor
) -> list[Tensor]:
    """Score bias of every layer for queries of one or several blocks over one shared context.

    A query of the block that starts at position s sees the context rows at positions < s and the rows of its
    own block; on a causal layer only keys at positions <= its own; on a sliding layer of window w (counting
    the current token) only keys at q - w < k, and k < q + w too when the layer is non-causal.

    context_positions: [T]; positions, starts: [Q], the query's position and its block's first position (by
    which blocks are told apart) -> per layer [Q, T + Q], float32, 0 where visible and -inf elsewhere.
    """
    own = starts[:, None] == starts[None, :]
    base = torch.cat((context_positions[None, :] < starts[:, None], own), dim=1)
    gap = positions[:, None] - torch.cat((context_positions, positions))[None, :]
    biases: dict[tuple[str, bool], Tensor] = {}
    for kind, causal in zip(shape.layer_types, shape.causal, strict=True):
        if (kind, causal) in biases:
            continue
        visible = base
        if causal:
            visible = visible & (gap >= 0)
        if kind == "sliding_attention":
            assert shape.window is not None
            visible = visible & (gap.abs() < shape.window)
        bias = torch.zeros(visible.shape, device=visible.device)
        biases[kind, causal] = bias.masked_fill(~visible, float("-inf"))
    return [biases[key] for key in zip(shape.layer_types, shape.causal, strict=True)]
