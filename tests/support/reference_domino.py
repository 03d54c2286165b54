"""Domino in plain PyTorch: a plain draft's rows, and a GRU over the tokens that were chosen.

Written from the published format, apart from the served model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference_dspark import ReferenceWalk
from tests.support.tiny import draft_config, draft_tensors
from training.modeling import DraftModel

CANDIDATES = 16
SIZES = dict(gru_hidden_dim=24, emb_dim=12)
OF_DOMINO = dict(projector_type="domino", pure_draft_prefix_len=1, shift_label=True, **SIZES)


def domino_config(**overrides: Any) -> dict[str, Any]:
    """`tiny.draft_config` of a Domino draft; `dflash_config` is merged."""
    nested = {**OF_DOMINO, **(overrides.pop("dflash_config", None) or {})}
    return draft_config(is_causal=False, dflash_config=nested, **overrides)


def domino_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    return {**draft_tensors(config, seed), **added_tensors(config, seed)}


def added_tensors(config: dict[str, Any], seed: int = 1, scale: float = 1.0) -> dict[str, Tensor]:
    """What a Domino checkpoint has beside a plain one's: random, `scale` away from doing nothing."""
    generator = torch.Generator().manual_seed(100 + seed)
    hidden, (size, rank) = config["hidden_size"], (config["dflash_config"][name] for name in SIZES)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    return {
        "prefix_gru.weight_ih_l0": matrix(3 * size, hidden),
        "prefix_gru.weight_hh_l0": 2 * matrix(3 * size, size),
        "embed_proj.0.weight": 3 * matrix(rank, hidden + size),
        "embed_proj.2.weight": scale * torch.randn(config["vocab_size"], rank, generator=generator),
    }


class ReferenceDomino(ReferenceWalk):
    """A Domino checkpoint, with the target's embedding."""

    embed: nn.Module
    gru: nn.GRU
    proj: tuple[Tensor, Tensor]
    shifted: bool

    @staticmethod
    def of_target(config: Any, weights: Any, embed: nn.Module) -> ReferenceDomino:
        weights, model = {name: weight.float() for name, weight in weights.items()}, DraftModel(config)
        reference = ReferenceDomino(model)
        nested = config["dflash_config"]
        reference.embed, reference.shifted = embed, nested["shift_label"]
        reference.gru = nn.GRU(config["hidden_size"], nested["gru_hidden_dim"], bias=False, batch_first=True)
        of_gru = {name.removeprefix("prefix_gru."): name for name in weights if name.startswith("prefix_gru.")}
        reference.gru.load_state_dict({name: weights.pop(full) for name, full in of_gru.items()})
        reference.proj = weights.pop("embed_proj.0.weight"), weights.pop("embed_proj.2.weight")
        model.load_state_dict(weights)
        return reference

    def proposing(self, hidden: Tensor) -> Tensor:
        return hidden[:-1] if self.shifted else hidden[1:]

    @torch.no_grad()
    def scores(self, rows: Tensor, head: nn.Module, before: list[int]) -> dict[int, float]:
        logits, ids = head(rows[-1]).topk(min(CANDIDATES, len(self.proj[1])))
        if len(before) > 1:
            states, _ = self.gru(self.embed(torch.tensor([before])).float())
            hidden = nn.functional.silu(self.proj[0] @ torch.cat((rows[-1], states[0, -1])))
            logits = logits + self.proj[1][ids] @ hidden
        return dict(zip(ids.tolist(), logits.tolist(), strict=True))
