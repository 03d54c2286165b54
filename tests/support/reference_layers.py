"""Draft layers of other families in plain PyTorch: what they change of `training.modeling`'s.

Written from the published configs, apart from the served model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tiny import draft_tensors
from training.modeling import DraftModel, DraftShape
from training.reference import ReferenceDraft

SWIGLU = dict(hidden_act="swigluoai", swiglu_alpha=1.702, swiglu_limit=0.7)  # a limit that tiny drafts reach


def is_norm(name: str) -> bool:
    return name.rpartition(".")[0].endswith("norm")


def layer_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights of a draft of `config`, whose norms change their input."""
    tensors = draft_tensors(config, seed)
    if config.get("use_gemma_norm"):
        return {name: tensor - 1 if is_norm(name) else tensor for name, tensor in tensors.items()}
    return tensors


def reference_draft(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ReferenceDraft:
    """A reference of a draft with Gemma's norms, gpt-oss's activation, or both."""
    model = DraftModel(config)
    if config.get("hidden_act") == "swigluoai":
        for layer in model.layers:
            layer.mlp = ClampedMLP(model.shape, config["swiglu_alpha"], config["swiglu_limit"])
    added = 1.0 if config.get("use_gemma_norm") else 0.0
    model.load_state_dict({n: w.float() + added if is_norm(n) else w.float() for n, w in weights.items()})
    return ReferenceDraft(model)


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
