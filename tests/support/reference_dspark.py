"""DSpark in plain PyTorch: a plain draft's rows, the anchor's row among those that propose, and a Markov head.

Written from the published format, apart from the served model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tiny import draft_config, draft_tensors
from training.modeling import DraftModel
from training.reference import ReferenceDraft

CANDIDATES = 16
RANK = 12


def dspark_config(**overrides: Any) -> dict[str, Any]:
    """`tiny.draft_config` of a DSpark draft as z-lab's format has it: 7 rows, a block of 8."""
    fixed = dict(architectures=["Qwen3DSparkModel"], is_causal=False, block_size=7)
    return draft_config(**{**fixed, "markov_rank": RANK, "markov_head_type": "vanilla", **overrides})


def dspark_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    return {**draft_tensors(config, seed), **added_tensors(config, seed)}


def added_tensors(config: dict[str, Any], seed: int = 1, scale: float = 1.0) -> dict[str, Tensor]:
    """What a DSpark checkpoint has beside a plain one's: random, `scale` away from doing nothing."""
    generator = torch.Generator().manual_seed(100 + seed)
    vocab, rank = config["vocab_size"], config["markov_rank"]
    scored = config.get("draft_vocab_size", vocab)
    tensors = {
        "markov_head.markov_w1.weight": torch.randn(vocab, rank, generator=generator),
        "markov_head.markov_w2.weight": scale * torch.randn(scored, rank, generator=generator),
        "confidence_head.proj.weight": torch.randn(1, config["hidden_size"] + rank, generator=generator),
        "confidence_head.proj.bias": torch.randn(1, generator=generator),
    }
    if config.get("markov_head_type") == "gated":
        wide = config["hidden_size"] + rank
        gate = torch.randn(rank, wide, generator=generator) * wide**-0.5
        tensors |= {
            "markov_head.gate_proj.weight": gate,
            "markov_head.gate_proj.bias": torch.randn(rank, generator=generator),
        }
    if config.get("markov_head_type") == "rnn":
        wide = config["hidden_size"] + 2 * rank
        tensors |= {
            "markov_head.joint_proj.weight": torch.randn(3 * rank, wide, generator=generator) * wide**-0.5,
            "markov_head.joint_proj.bias": torch.randn(3 * rank, generator=generator),
        }
    return tensors


class ReferenceWalk(ReferenceDraft):
    """`training.reference.ReferenceDraft` of a draft that chooses each token given those before it."""

    def scores(self, rows: Tensor, head: nn.Module, before: list[int]) -> dict[int, float]:
        """rows [steps, hidden] up to this step, and the token before each -> {token: score} of the last one's
        likeliest tokens, the likeliest first."""
        raise NotImplementedError

    def proposing(self, hidden: Tensor) -> Tensor:
        """hidden [rows, hidden] of a block -> those that propose."""
        return hidden

    def propose(self, hidden: Tensor, head: nn.Module, anchor: int) -> list[int]:
        rows, walk = self.proposing(hidden), [anchor]
        for step in range(len(rows)):
            scores = self.scores(rows[: step + 1], head, walk)
            walk.append(max(scores, key=scores.__getitem__))
        return walk[1:]


class ReferenceDSpark(ReferenceWalk):
    """A DSpark checkpoint. Its blocks have no row for the last proposal."""

    w1: Tensor
    w2: Tensor
    gate: tuple[Tensor, Tensor] | None = None
    joint: tuple[Tensor, Tensor] | None = None
    ids: list[int] | None = None  # of the target, of each row of the head and of w2; None: the row
    head: Any = None  # of its own: rows -> logits

    @classmethod
    def from_weights(cls, config: Any, weights: Any) -> ReferenceDSpark:
        weights, model = {name: weight.float() for name, weight in weights.items()}, DraftModel(config)
        reference = cls(model)
        if "lm_head.weight" in weights:  # rows behind those of the vocabulary pad it
            own = weights["lm_head.weight"][: config["vocab_size"]]
            reference.head = lambda rows: rows @ own.T
        if "d2t" in weights:
            reference.ids = [row + int(offset) for row, offset in enumerate(weights["d2t"])]
        weights = {n: w for n, w in weights.items() if n not in ("d2t", "t2d", "lm_head.weight")}
        reference.w1, reference.w2 = (weights.pop(f"markov_head.markov_{name}.weight") for name in ("w1", "w2"))
        for name, module in (("gate", "gate_proj"), ("joint", "joint_proj")):
            if f"markov_head.{module}.weight" in weights:
                matrices = tuple(weights.pop(f"markov_head.{module}.{of}") for of in ("weight", "bias"))
                setattr(reference, name, matrices)
        model.load_state_dict({n: w for n, w in weights.items() if not n.startswith("confidence_head.")})
        return reference

    @torch.no_grad()
    def scores(self, rows: Tensor, head: nn.Module, before: list[int]) -> dict[int, float]:
        logits, ids = head(rows[-1]).topk(min(CANDIDATES, len(self.w2)))
        context = self.w1[before[-1]]
        if self.gate is not None:
            weight, bias = self.gate
            context = context * torch.sigmoid(weight @ torch.cat((rows[-1], context)) + bias)
        if self.joint is not None:
            (weight, bias), state = self.joint, torch.zeros(self.w1.shape[1])
            for row, token in zip(rows, before, strict=True):
                gate, new, out = (weight @ torch.cat((state, self.w1[token], row)) + bias).chunk(3)
                state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(new)
            context = torch.tanh(out)
        tokens = [row if self.ids is None else self.ids[row] for row in ids.tolist()]
        return dict(zip(tokens, (logits + self.w2[ids] @ context).tolist(), strict=True))
