"""DFlash2 in loops: convolution, selector walk and the whole draft, and random checkpoints to run them on.

Written from the formulas in `models/convolution.py` and `models/dflash2.py`, on the plain reference's modules,
apart from the served model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.tiny import draft_config, draft_tensors
from training.modeling import DraftLayer, DraftModel, DraftShape
from training.reference import ReferenceDraft

SIZES = dict(conv_kernel_size=2, conv_group_size=16, selector_rank=12, selector_top_k=5)


def dflash2_config(**overrides: Any) -> dict[str, Any]:
    """`tiny.draft_config` of a DFlash2 draft in the published layout: non-causal, block size nested."""
    nested = {**SIZES, "block_size": 8, **(overrides.pop("dflash_config", None) or {})}
    fixed = dict(architectures=["DFlash2DraftModel"], is_causal=False, block_size=None)
    return draft_config(**{**fixed, **overrides}, dflash_config=nested)


def dflash2_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    return {**draft_tensors(config, seed), **added_tensors(config, seed)}


def added_tensors(config: dict[str, Any], seed: int = 1, scale: float = 1.0) -> dict[str, Tensor]:
    """What a DFlash2 checkpoint has beside a plain one's: random, `scale` away from doing nothing."""
    generator = torch.Generator().manual_seed(100 + seed)
    nested, hidden, vocab = config["dflash_config"], config["hidden_size"], config["vocab_size"]
    rank, taps = nested["selector_rank"], nested.get("conv_kernel_size") or 0

    def random(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    tensors = {
        "candidate_selector.hidden_projection.weight": random(rank, hidden) * hidden**-0.5,
        "candidate_selector.predecessor_codebook": random(vocab, rank),
        "candidate_selector.successor_codebook": random(vocab, rank) * rank**-0.5,
    }
    for layer in range(config["num_hidden_layers"] if taps else 0):
        for name in ("attention_conv", "mlp_conv"):
            base, kernels = 0.5 * random(2, taps, hidden), 2 * taps * (hidden // nested["conv_group_size"])
            base[:, 0] += 1
            projection = 0.5 * random(kernels, hidden) * hidden**-0.5
            tensors[f"layers.{layer}.{name}.base_kernel"] = base
            tensors[f"layers.{layer}.{name}.kernel_projection.weight"] = projection
    return tensors


def convolution_loop(rows: Tensor, dynamic: Tensor, base: Tensor, block_size: int) -> Tensor:
    """rows [T, hidden], dynamic [T, taps, groups], base [taps, hidden] -> [T, hidden], number by number."""
    total, hidden = rows.shape
    _, taps, groups = dynamic.shape
    values, moving, fixed = rows.tolist(), dynamic.tolist(), base.tolist()
    out = [[0.0] * hidden for _ in range(total)]
    for row in range(total):
        first = row - row % block_size
        for channel in range(hidden):
            group = channel // (hidden // groups)
            for tap in range(taps):
                if row - tap >= first:
                    factor = fixed[tap][channel] + moving[row][tap][group]
                    out[row][channel] += factor * values[row - tap][channel]
    return torch.tensor(out)


def walk_loop(
    predecessor: Tensor,
    successor: Tensor,
    candidates: Tensor,
    logits: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    temperature: float = 1.0,
    choose: Callable[[int, int, list[float]], int] | None = None,
    gate: Tensor | None = None,
) -> tuple[list[list[int]], list[list[list[float]]]]:
    """The walks of a batch, edge by edge -> (tokens, probabilities of each step's candidates).

    `choose(request, step, probabilities)` gives a step's index; by default the highest score, the first of equals.
    gate: the factor of an edge is sigmoid(hidden + gate @ the predecessor's row) in place of the hidden row.
    """  # fmt: skip
    tokens: list[list[int]] = []
    probs: list[list[list[float]]] = []
    for request, token in enumerate(anchors.tolist()):
        path, rows = [], []
        for step, ids in enumerate(candidates[request].tolist()):
            before, projected = predecessor[token].tolist(), hidden[request, step]
            if gate is not None:
                projected = torch.sigmoid(projected + gate @ predecessor[token])
            projected, scores = projected.tolist(), []
            for place, candidate in enumerate(ids):
                score = float(logits[request, step, place])
                for a, h, b in zip(before, projected, successor[candidate].tolist(), strict=True):
                    score += a * h * b
                scores.append(score)
            weights = [math.exp((score - max(scores)) / temperature) for score in scores]
            row = [weight / sum(weights) for weight in weights]
            token = ids[scores.index(max(scores)) if choose is None else choose(request, step, row)]
            path.append(token)
            rows.append(row)
        tokens.append(path)
        probs.append(rows)
    return tokens, probs


class Convolution(nn.Module):
    def __init__(self, hidden: int, taps: int, group_size: int, block_size: int) -> None:
        super().__init__()
        self.block_size, self.taps, self.groups = block_size, taps, hidden // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * self.groups, bias=False)

    def around(self, rows: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        dynamic = self.kernel_projection(rows).view(-1, 2, self.taps, self.groups)
        convolved = convolution_loop(rows, dynamic[:, 0], self.base_kernel[0], self.block_size)
        return convolution_loop(sublayer(convolved), dynamic[:, 1], self.base_kernel[1], self.block_size)


class Layer(DraftLayer):
    def __init__(self, shape: DraftShape, layer: int, taps: int, group_size: int) -> None:
        super().__init__(shape, layer)
        size = (shape.hidden_size, taps, group_size, shape.block_size)
        self.attention_conv, self.mlp_conv = Convolution(*size), Convolution(*size)

    def forward(self, h: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        attend = lambda rows: self.self_attn(rows, positions, context, bias)  # noqa: E731
        h = h + self.attention_conv.around(self.input_layernorm(h), attend)
        return h + self.mlp_conv.around(self.post_attention_layernorm(h), self.mlp)


class Selector(nn.Module):
    def __init__(self, hidden: int, vocab: int, rank: int) -> None:
        super().__init__()
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))


class DFlash2(DraftModel):
    """The layers of a plain draft, with convolutions where the config has them, and a selector."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        shape, self.nested = self.shape, config["dflash_config"]
        taps, group_size = self.nested.get("conv_kernel_size"), self.nested.get("conv_group_size")
        if taps:
            self.layers = nn.ModuleList(Layer(shape, i, taps, group_size) for i in range(shape.num_layers))
        rank = self.nested["selector_rank"]
        self.candidate_selector = Selector(shape.hidden_size, config["vocab_size"], rank)

    def propose(self, hidden: Tensor, head: nn.Module, anchor: int) -> list[int]:
        """hidden [block, hidden] after the final norm -> the tokens of the likeliest walk."""
        selector = self.candidate_selector
        rows = hidden[1:]
        logits, candidates = head(rows).topk(self.nested["selector_top_k"], dim=-1)
        logits = logits * self.nested.get("output_multiplier", 1.0)
        if cap := self.nested.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        (tokens,), _ = walk_loop(
            selector.predecessor_codebook, selector.successor_codebook, candidates[None], logits[None],
            selector.hidden_projection(rows)[None], torch.tensor([anchor]),
        )  # fmt: skip
        return tokens


class ReferenceDFlash2(ReferenceDraft):
    """`training.reference.ReferenceDraft` of a DFlash2 checkpoint."""

    model: DFlash2

    @staticmethod
    def from_weights(config: Any, weights: Any) -> ReferenceDFlash2:
        model = DFlash2(config)
        model.load_state_dict({name: weight.float() for name, weight in weights.items()}, strict=True)
        return ReferenceDFlash2(model)

    @torch.no_grad()
    def propose(self, hidden: Tensor, head: nn.Module, anchor: int) -> list[int]:
        return self.model.propose(hidden, head, anchor)
