"""LiLiCorr in plain PyTorch: the rows of a plain draft or of one with convolutions, and a transformer over the
candidates of one block.

Written from the published format, apart from the served model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference_dflash2 import Convolved, convolution_tensors
from tests.support.tiny import draft_config, draft_tensors
from training.modeling import RMSNorm
from training.reference import ReferenceDraft

SIZES: dict[str, Any] = dict(
    lilicorr_enabled=True,
    lilicorr_candidate_topk=8,
    lilicorr_hidden_size=48,
    lilicorr_num_layers=2,
    lilicorr_num_heads=4,
    lilicorr_mlp_ratio=1.5,
    lilicorr_factor_dim=12,
    lilicorr_vector_eps=1e-6,
    lilicorr_logit_scale=6.0,
)


CONVOLUTIONS: dict[str, Any] = dict(conv_kernel_size=3, conv_group_size=16)
"""What `dflash_config` has beside SIZES in a draft with convolutions."""


def lilicorr_config(**overrides: Any) -> dict[str, Any]:
    """`tiny.draft_config` of a LiLiCorr draft; `dflash_config` is merged."""
    nested = {**SIZES, **(overrides.pop("dflash_config", None) or {})}
    return draft_config(
        **{"architectures": ["LiLiCorrDraftModel"], "is_causal": False, **overrides}, dflash_config=nested
    )


def lilicorr_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    return {**draft_tensors(config, seed), **added_tensors(config, seed)}


def added_tensors(config: dict[str, Any], seed: int = 1, scale: float = 1.0) -> dict[str, Tensor]:
    """What a LiLiCorr checkpoint has beside a plain one's: random, convolutions `scale` away from nothing."""
    generator, tensors = torch.Generator().manual_seed(100 + seed), {}
    for name, like in Head(config).state_dict().items():
        draws = torch.randn(like.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            draws = 1 + 0.1 * draws
        elif like.ndim == 2 and name.endswith("weight"):
            draws *= 1.5 * like.shape[1] ** -0.5
        tensors[f"lilicorr.{name}"] = draws
    return {**tensors, **convolution_tensors(config, generator, scale)}


class Layer(nn.Module):
    def __init__(self, size: int, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attn = nn.MultiheadAttention(size, heads, batch_first=True)
        self.mlp = nn.ModuleDict(dict(up_proj=nn.Linear(size, width), down_proj=nn.Linear(width, size)))

    def forward(self, rows: Tensor, bias: Tensor) -> Tensor:
        normed = self.attn_norm(rows)[None]
        rows = rows + self.attn(normed, normed, normed, attn_mask=bias, need_weights=False)[0][0]
        inner = nn.functional.silu(self.mlp["up_proj"](self.mlp_norm(rows)))
        return rows + self.mlp["down_proj"](inner)


class Head(nn.Module):
    """By the names of the checkpoint; one block at a time."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        of, hidden, eps = config["dflash_config"], config["hidden_size"], config["rms_norm_eps"]
        block = of.get("block_size", config.get("block_size"))
        self.count, self.scale = of["lilicorr_candidate_topk"], of["lilicorr_logit_scale"]
        self.eps, heads = of["lilicorr_vector_eps"], of["lilicorr_num_heads"]
        size, factor = of["lilicorr_hidden_size"] or hidden, of["lilicorr_factor_dim"]
        if size != hidden:
            self.token_proj = nn.Linear(hidden, size)
        self.pass_hidden_proj, self.context_proj = nn.Linear(hidden, size), nn.Linear(hidden, size)
        self.feature_norm = nn.LayerNorm(5)
        self.feature_mlp = nn.ModuleDict(dict(up_proj=nn.Linear(5, size), down_proj=nn.Linear(size, size)))
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, block - 1, 1, size))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, self.count, size))
        self.relative_slot_bias = nn.Parameter(torch.empty(heads, 2 * block - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(heads))
        width = int(size * of["lilicorr_mlp_ratio"])
        self.layers = nn.ModuleList(Layer(size, heads, width, eps) for _ in range(of["lilicorr_num_layers"]))
        self.output_norm, self.anchor_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head = nn.Linear(size, factor), nn.Linear(size, factor)
        self.anchor_out_head = nn.Linear(size, factor)
        self.trained = block

    def edges(
        self, rows: Tensor, logprobs: Tensor, embeddings: Tensor, context: Tensor | None
    ) -> list[list[list[float]]]:
        """rows [steps, hidden], logprobs [steps, K], embeddings [steps, K, hidden], context [hidden] or None ->
        [step][place before][place] of scores; the first step has one place before."""
        places = [(step, rank) for step in range(len(rows)) for rank in range(self.count)]
        states = torch.stack(
            [self._state(step, rank, rows, logprobs[step], embeddings[step]) for step, rank in places]
        )
        bias = torch.stack([torch.stack([self._bias(a[0], b[0]) for b in places]) for a in places])
        for layer in self.layers:
            states = layer(states, bias.permute(2, 0, 1))
        states = self.output_norm(states)
        anchor = torch.zeros(states.shape[1]) if context is None else self.context_proj(context)
        anchor = self.anchor_norm(anchor)
        inner = [self.factor_input_proj(torch.cat((state, anchor, state * anchor))) for state in states]
        inner = nn.functional.silu(torch.stack(inner))
        out, into = (
            self._unit(head(inner)).view(len(rows), self.count, -1) for head in (self.out_head, self.in_head)
        )
        before = [self._unit(self.anchor_out_head(anchor))[None], *out[:-1]]
        return [(self.scale * a @ b.T).tolist() for a, b in zip(before, into, strict=True)]

    def _state(self, step: int, rank: int, rows: Tensor, logprobs: Tensor, embeddings: Tensor) -> Tensor:
        own = logprobs[rank]
        of_rank = torch.tensor([rank / (self.count - 1), float(rank == 0)])
        features = torch.cat((torch.stack((own, own.exp(), own - logprobs.max())), of_rank))
        token = embeddings[rank]
        if hasattr(self, "token_proj"):
            token = self.token_proj(token)
        inner = nn.functional.silu(self.feature_mlp["up_proj"](self.feature_norm(features)))
        state = token + self.pass_hidden_proj(rows[step]) + self.feature_mlp["down_proj"](inner)
        return state + self.slot_embedding[0, 0, step, 0] + self.rank_embedding[0, 0, 0, rank]

    def _bias(self, query: int, key: int) -> Tensor:
        bias = self.relative_slot_bias[:, query - key + self.trained - 1]
        return bias + self.same_slot_bias if query == key else bias

    def _unit(self, vectors: Tensor) -> Tensor:
        return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=self.eps)


class ReferenceLiLiCorr(ReferenceDraft):
    """`training.reference.ReferenceDraft` of a LiLiCorr checkpoint, with the target's embedding.

    `context_kv` keeps the last context row for the block after it, and `propose` the block for `scores`.
    """

    embed: nn.Module
    head: Head

    @staticmethod
    def of_target(config: Any, weights: Any, embed: nn.Module, served: int | None = None) -> ReferenceLiLiCorr:
        """served: rows of a block, as many as trained by default."""
        block = {} if served is None else {"block_size": served}
        model, head = Convolved({**config, **block}), Head(config)
        reference = ReferenceLiLiCorr(model)
        own = {name: weight.float() for name, weight in weights.items()}
        of_head = {
            name.removeprefix("lilicorr."): own.pop(name) for name in weights if name.startswith("lilicorr.")
        }
        head.load_state_dict(of_head)
        model.load_state_dict(own)
        reference.embed, reference.head = embed, head.eval()
        return reference

    @torch.no_grad()
    def context_kv(self, features: Tensor, positions: Tensor) -> Any:
        self._context = self.model.context_rows(features[-1:])[0]
        return super().context_kv(features, positions)

    @torch.no_grad()
    def propose(self, hidden: Tensor, head: nn.Module, anchor: int) -> list[int]:
        rows = hidden[1:]
        logprobs, self._ids = head(rows).log_softmax(-1).topk(self.head.count)
        self._edges = self.head.edges(rows, logprobs, self.embed(self._ids), self._context)
        walk = [anchor]
        for _ in rows:
            scores = self.scores(rows, head, walk)
            walk.append(max(scores, key=scores.__getitem__))
        return walk[1:]

    def scores(self, rows: Tensor, head: nn.Module, before: list[int]) -> dict[int, float]:
        """{token: score} of the step after the tokens before, the likeliest first, of the block that was proposed
        last."""
        del rows, head
        step = len(before) - 1
        place = self._ids[step - 1].tolist().index(before[-1]) if step else 0
        return dict(zip(self._ids[step].tolist(), self._edges[step][place], strict=True))
