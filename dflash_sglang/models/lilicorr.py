"""LiLiCorr drafts: the layers of a plain DFlash draft, and a transformer over the candidates of a whole block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from torch import Tensor, nn
from torch.nn import functional

from dflash_sglang.checkpoint.lilicorr import FEATURES, LiLiCorrSpec
from dflash_sglang.kernels.head.pack_shard import Candidates
from dflash_sglang.kernels.head.selector_walk import Codebooks, Draw, Lattice, selector_walk
from dflash_sglang.models.borrowed import Borrowed
from dflash_sglang.models.context_kv.last_rows import Context
from dflash_sglang.models.draft import DFlashDraftModel
from dflash_sglang.models.head.target_head import find_embedding
from dflash_sglang.models.layers import of_checkpoint
from dflash_sglang.settings.plugin_config import DraftHeadForm

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

Make = Callable[..., ReplicatedLinear]
"""(inputs, outputs, prefix=...) -> a layer of one quantisation."""


def _apply(layer: ReplicatedLinear, rows: Tensor) -> Tensor:
    return layer(rows)[0]


class LatticeMLP(nn.Module):
    """down_proj silu(up_proj x)"""

    def __init__(self, make: Make, inputs: int, width: int, outputs: int, prefix: str) -> None:
        super().__init__()
        self.up_proj = make(inputs, width, prefix=f"{prefix}.up_proj")
        self.down_proj = make(width, outputs, prefix=f"{prefix}.down_proj")

    def forward(self, rows: Tensor) -> Tensor:
        return _apply(self.down_proj, functional.silu(_apply(self.up_proj, rows)))


class LatticeAttention(nn.Module):
    """Every candidate of a block attends to all of them. Weights have the names of torch's MultiheadAttention."""

    def __init__(self, make: Make, spec: LiLiCorrSpec, prefix: str) -> None:
        super().__init__()
        size = spec.hidden_size
        self.heads = spec.num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = make(size, size, prefix=f"{prefix}.out_proj")

    def forward(self, rows: Tensor, bias: Tensor) -> Tensor:
        """rows [bs * n, size]; bias [heads, n, n], added to the scores -> [bs * n, size]"""
        size, number = rows.shape[1], bias.shape[1]
        qkv = functional.linear(rows, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(-1, number, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return _apply(self.out_proj, seen.transpose(1, 2).reshape(-1, size))


class LatticeLayer(nn.Module):
    def __init__(self, make: Make, spec: LiLiCorrSpec, norm_eps: float, prefix: str) -> None:
        super().__init__()
        size = spec.hidden_size
        self.attn_norm = RMSNorm(size, eps=norm_eps)
        self.attn = LatticeAttention(make, spec, f"{prefix}.attn")
        self.mlp_norm = RMSNorm(size, eps=norm_eps)
        self.mlp = LatticeMLP(make, size, spec.intermediate_size, size, f"{prefix}.mlp")

    def forward(self, rows: Tensor, bias: Tensor) -> Tensor:
        rows = rows + self.attn(self.attn_norm(rows), bias)
        return rows + self.mlp(self.mlp_norm(rows))


class LiLiCorrHead(nn.Module):
    """Scores the edges between the K candidates of each step and those of the next.

    A candidate starts as the sum of its projected embedding, of its step's projected row, of what an MLP makes of
    its FEATURES, and of vectors of its step and of its rank. Layers without a causal mask run over all candidates
    of the block. From a candidate's row x and the context row a, both normed, comes

        z = silu(factor_input_proj [x; a; x * a])

    and from z two vectors of length 1, `out_head` z and `in_head` z. The score of an edge is `scale` times the
    product of the one candidate's out-vector and the next one's in-vector. The first step's out-vector is the
    context row's, `anchor_out_head` a. Logits count as features alone.

    Whole on every rank of a tensor-parallel group.
    """

    def __init__(
        self,
        spec: LiLiCorrSpec,
        hidden_size: int,
        block_size: int,
        norm_eps: float,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        """hidden_size, block_size: of the draft, as it was trained."""
        super().__init__()
        self.spec, self.block_size = spec, block_size
        size, make = spec.hidden_size, partial(ReplicatedLinear, quant_config=quant_config)

        def linear(name: str, outputs: int, inputs: int = hidden_size) -> ReplicatedLinear:
            return make(inputs, outputs, prefix=f"{prefix}.{name}")

        self.token_proj = None if size == hidden_size else linear("token_proj", size)
        self.pass_hidden_proj = linear("pass_hidden_proj", size)
        self.context_proj = linear("context_proj", size)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = LatticeMLP(ReplicatedLinear, FEATURES, size, size, f"{prefix}.feature_mlp")
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, block_size - 1, 1, size))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, spec.candidates, size))
        self.relative_slot_bias = nn.Parameter(torch.empty(spec.num_heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(spec.num_heads))
        self.layers = nn.ModuleList(
            LatticeLayer(make, spec, norm_eps, f"{prefix}.layers.{i}") for i in range(spec.num_layers)
        )
        self.output_norm = RMSNorm(size, eps=norm_eps)
        self.anchor_norm = RMSNorm(size, eps=norm_eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head = nn.Linear(size, spec.factor_size)
        self.in_head = nn.Linear(size, spec.factor_size)
        self.anchor_out_head = linear("anchor_out_head", spec.factor_size, size)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.slot_embedding.dtype

    def scores(self, hidden: Tensor, embeddings: Tensor, logprobs: Tensor, context: Context) -> Tensor:
        """hidden [bs, steps, hidden]: rows of the steps, at most as many as were trained. embeddings [bs, steps,
        K, hidden], logprobs [bs, steps, K] float32 over the whole vocabulary: of the candidates, the likeliest
        first. -> [bs, steps, K, K] float32: of a step's candidates (last) after each of the step before; of the
        first step the same after all. Capturable in a CUDA graph."""
        (bs, steps, count), size = logprobs.shape, self.spec.hidden_size
        rows = embeddings.to(self.dtype).flatten(0, 2)
        if self.token_proj is not None:
            rows = _apply(self.token_proj, rows)
        lattice = rows.view(bs, steps, count, size)
        of_steps = _apply(self.pass_hidden_proj, hidden.to(self.dtype).flatten(0, 1))
        lattice = lattice + of_steps.view(bs, steps, 1, size)
        features = self.feature_norm(self._features(logprobs).to(self.dtype))
        lattice = lattice + self.feature_mlp(features.flatten(0, 2)).view(lattice.shape)
        lattice = lattice + self.slot_embedding[0, :, :steps] + self.rank_embedding[0]
        rows, bias = lattice.view(-1, size), self._attention_bias(steps, count)
        for layer in self.layers:
            rows = layer(rows, bias)
        lattice = self.output_norm(rows).view(lattice.shape)
        anchor = _apply(self.context_proj, context.rows.to(self.dtype)) * context.known[:, None]
        anchor = self.anchor_norm(anchor)
        out, into = self._vectors(lattice, anchor)
        first = self._unit(_apply(self.anchor_out_head, anchor))[:, None, None].expand(-1, 1, count, -1)
        before = torch.cat((first, out[:, :-1]), dim=1)
        return self.spec.scale * torch.matmul(before.float(), into.float().transpose(-1, -2))

    def _features(self, logprobs: Tensor) -> Tensor:
        """[bs, steps, K] -> [bs, steps, K, FEATURES]"""
        count = logprobs.shape[-1]
        rank = torch.arange(count, dtype=torch.float32, device=logprobs.device)
        of_rank = [of.expand_as(logprobs) for of in (rank / max(count - 1, 1), (rank == 0).float())]
        return torch.stack((logprobs, logprobs.exp(), logprobs - logprobs[..., :1], *of_rank), dim=-1)

    def _attention_bias(self, steps: int, count: int) -> Tensor:
        """[heads, steps * K, steps * K]: by how many steps a candidate is behind the one that it attends to."""
        step = torch.arange(steps, device=self.same_slot_bias.device).repeat_interleave(count)
        behind = step[:, None] - step
        same = (behind == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, behind + self.block_size - 1] + same

    def _vectors(self, lattice: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """lattice [bs, steps, K, size], anchor [bs, size] -> out- and in-vectors [bs, steps, K, factor]"""
        of_token, of_anchor, of_both = self.factor_input_proj.weight.chunk(3, dim=1)
        anchor, alike = anchor[:, None, None], functional.linear(anchor, of_anchor, self.factor_input_proj.bias)
        inner = functional.linear(lattice, of_token) + functional.linear(lattice * anchor, of_both)
        inner = functional.silu(inner + alike[:, None, None])
        return self._unit(self.out_head(inner)), self._unit(self.in_head(inner))

    def _unit(self, vectors: Tensor) -> Tensor:
        return functional.normalize(vectors, dim=-1, eps=self.spec.eps)


class LiLiCorrEdges:
    """Walks by the scores of a `LiLiCorrHead`, which count alone: candidate y after x of the step before scores
    what their edge does, whatever its logit.

    The walk is the selector's over places among the candidates instead of tokens. A place's predecessor and
    successor are rows of zeros and ones that take the place's row and column out of the K x K scores of a step.
    """

    def __init__(self, head: LiLiCorrHead, embed: Callable[[Tensor], Tensor]) -> None:
        """embed: ids [n] -> [n, hidden], as the target embeds them; a collective where ranks share the table."""
        self._head, self._embed = head, embed
        self.candidates = count = head.spec.candidates
        place = torch.eye(count, dtype=torch.float32, device=head.slot_embedding.device)
        self._places = Codebooks(place.repeat_interleave(count, dim=1), place.repeat(1, count))

    @property
    def projection(self) -> tuple[int, torch.dtype]:
        return self.candidates**2, torch.float32

    def project(self, rows: Tensor, candidates: Candidates, context: Context | None) -> Tensor:
        assert context is not None  # of the model's `last_rows`
        bs, count = len(context.known), self.candidates
        embeddings = self._embed(candidates.ids.flatten()).view(bs, -1, count, rows.shape[-1])
        logprobs = candidates.logprobs.view(bs, -1, count)
        return self._head.scores(rows.view(bs, -1, rows.shape[-1]), embeddings, logprobs, context).view(
            len(rows), -1
        )

    def walk(
        self, lattice: Lattice, tokens: Tensor, logprobs: Tensor | None = None, draw: Draw | None = None
    ) -> Tensor | None:
        bs, steps, count = lattice.candidates.shape
        places = torch.arange(count, device=tokens.device).expand(bs, steps, -1).contiguous()
        walked = tokens.new_zeros((bs, steps + 1))
        by_place = Lattice(places, torch.zeros_like(lattice.logits), lattice.hidden)
        probs = selector_walk(self._places, by_place, walked, logprobs, draw)
        tokens[:, 1:] = lattice.candidates.gather(2, walked[:, 1:, None]).squeeze(2)
        return probs


class LiLiCorrDraftModel(DFlashDraftModel):
    """A LiLiCorr draft.

    Raises DraftConfigError for a config that cannot be served.
    """

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        spec = self.spec
        assert spec.lilicorr is not None  # of the architecture in EntryClass
        self.lilicorr = LiLiCorrHead(
            spec.lilicorr,
            spec.hidden_size,
            spec.block_size,
            spec.rms_norm_eps,
            of_checkpoint(quant_config, spec),
            f"{prefix}.lilicorr" if prefix else "lilicorr",
        )
        self._embed: Callable[[Tensor], Tensor] | None = None

    @property
    def edges(self) -> LiLiCorrEdges:
        return LiLiCorrEdges(self.lilicorr, self._embedded)

    def bind_target(
        self,
        target_model: nn.Module,
        same_batch: int | None = None,
        token_map: Tensor | None = None,
        draft_head: DraftHeadForm = "as_is",
        vocab_size: int | None = None,
    ) -> Borrowed:
        """As of every draft. The head reads candidates by the target's embedding, whatever the draft's own."""
        table = find_embedding(target_model, same_batch)
        self._embed = lambda ids: table(ids)  # no module of the draft's
        return super().bind_target(target_model, same_batch, token_map, draft_head, vocab_size)

    def _embedded(self, ids: Tensor) -> Tensor:
        assert self._embed is not None  # bound before anything is proposed
        return self._embed(ids)


EntryClass = [LiLiCorrDraftModel]
