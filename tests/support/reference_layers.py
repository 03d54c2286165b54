"""Draft layers of other families in plain PyTorch: what they change of `training.modeling`'s.

Written from the published configs, apart from the served model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tiny import draft_tensors
from training.modeling import Attention, ContextKV, DraftModel, DraftShape, RMSNorm
from training.reference import ReferenceDraft

SWIGLU = dict(hidden_act="swigluoai", swiglu_alpha=1.702, swiglu_limit=0.7)  # a limit that tiny drafts reach


LAGUNA: dict[str, Any] = dict(
    architectures=["DFlashLagunaForCausalLM"], gating="per-head", dflash_config={"causal": True}
)


def is_norm(name: str) -> bool:
    return name.rpartition(".")[0].endswith("norm")


def gates(config: Mapping[str, Any]) -> int:
    """Of a Laguna draft, for each head."""
    return {"per-head": 1, "per-element": config["head_dim"], "disabled": 0}[config["gating"]]


def layer_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights of a draft of `config`, whose norms change their input."""
    tensors = draft_tensors(config, seed)
    if config["architectures"] == LAGUNA["architectures"]:
        tensors |= laguna_tensors(config, seed)
    if config.get("use_gemma_norm"):
        return {name: tensor - 1 if is_norm(name) else tensor for name, tensor in tensors.items()}
    return tensors


def laguna_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """What a Laguna checkpoint has beside a plain one's: random."""
    generator = torch.Generator().manual_seed(200 + seed)
    hidden, rows = config["hidden_size"], config["num_attention_heads"] * gates(config)
    features = len(config["dflash_config"]["target_layer_ids"])
    tensors = {
        f"aux_hidden_norms.{i}.weight": 1 + torch.randn(hidden, generator=generator) / 4 for i in range(features)
    }
    for i in range(config["num_hidden_layers"] if rows else 0):
        gate = torch.randn(rows, hidden, generator=generator) * hidden**-0.5
        tensors[f"layers.{i}.self_attn.g_proj.weight"] = gate
    return tensors


def reference_draft(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ReferenceDraft:
    """A reference of a draft with Gemma's norms, gpt-oss's activation, or both, or of a Laguna draft."""
    of_laguna = config["architectures"] == LAGUNA["architectures"]
    model = LagunaDraft(config) if of_laguna else DraftModel(config)
    if config.get("hidden_act") == "swigluoai":
        for layer in model.layers:
            layer.mlp = ClampedMLP(model.shape, config["swiglu_alpha"], config["swiglu_limit"])
    added = 1.0 if config.get("use_gemma_norm") else 0.0
    model.load_state_dict({n: w.float() + added if is_norm(n) else w.float() for n, w in weights.items()})
    return ReferenceDraft(model)


class LagunaDraft(DraftModel):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        shape = self.shape
        self.aux_hidden_norms = nn.ModuleList(
            RMSNorm(shape.hidden_size, shape.eps) for _ in shape.target_layer_ids
        )
        for i, layer in enumerate(self.layers):
            if gates(config):
                layer.self_attn = GatedAttention(shape, i, gates(config))

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        parts = features.unflatten(-1, (len(self.aux_hidden_norms), -1)).unbind(-2)
        normed = [norm(part) for norm, part in zip(self.aux_hidden_norms, parts, strict=True)]
        rows = self.context_rows(torch.cat(normed, dim=-1))
        return [layer.self_attn.keys_values(layer.input_layernorm(rows), positions) for layer in self.layers]


class GatedAttention(Attention):
    def __init__(self, shape: DraftShape, layer: int, of_head: int) -> None:
        super().__init__(shape, layer)
        self.of_head = of_head
        self.g_proj = nn.Linear(shape.hidden_size, shape.num_heads * of_head, bias=False)

    def forward(self, rows: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        gate = torch.log1p(torch.exp(self.g_proj(rows)))
        gate = gate.repeat_interleave(self.shape.head_dim // self.of_head, dim=-1)
        handle = self.o_proj.register_forward_pre_hook(lambda module, args: args[0] * gate)
        try:
            return super().forward(rows, positions, context, bias)
        finally:
            handle.remove()


class ClampedMLP(nn.Module):
    def __init__(self, shape: DraftShape, alpha: float, limit: float) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)
        self.alpha, self.limit = alpha, limit

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.minimum(self.gate_proj(x), torch.tensor(self.limit))
        up = torch.maximum(torch.minimum(self.up_proj(x), torch.tensor(self.limit)), -torch.tensor(self.limit))
        return self.down_proj(gate / (1 + torch.exp(-self.alpha * gate)) * (up + 1))
