"""Step-3.5's multi-token-prediction layers as a draft: SGLang's decoder layers, a chain, in one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.layer_boundary import layer_stack
from sglang.srt.layers.layer_boundary.residual import batch as residual
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.models.step3p5 import Step3p5DecoderLayer
from torch import Tensor, nn

from dflash_sglang.checkpoint.files import draft_config
from dflash_sglang.checkpoint.mtp import MtpSpec
from dflash_sglang.kernels.head.pack_shard import Candidates
from dflash_sglang.models.borrowed import BlockEmbedding, Borrowed, BorrowingDraft
from dflash_sglang.models.head.target_head import TargetHead, find_embedding
from dflash_sglang.models.layers import Quantisation
from dflash_sglang.models.loading.stacking import load_shard, stacked, still_missing
from dflash_sglang.models.mtp.recent_rows import Prompt, RecentRows
from dflash_sglang.startup.facts import LoadError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_JOINING = ("enorm.", "hnorm.", "eh_proj.")
_RENAMED = {"shared_head.norm.": "head_norm.", "shared_head.output.": "lm_head."}  # the checkpoint's names: ours


class MtpLayer(nn.Module):
    """One layer with its head: a row joins the hidden state of the layer before with a token's embedding."""

    def __init__(self, config: Any, layer: int, prefix: str) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.head_norm = (GemmaRMSNorm(hidden, eps) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * hidden, hidden, bias=False, prefix=f"{prefix}eh_proj")
        with layer_stack():
            self.block = Step3p5DecoderLayer(config=config, layer_id=layer, prefix=f"{prefix}block")
        self.lm_head = ParallelLMHead(config.vocab_size, hidden, prefix=f"{prefix}lm_head")

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """embedded, hidden [rows, hidden] -> [rows, hidden], before the head's norm."""
        joined, _ = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        residual.start(forward_batch)
        output = residual.fold(self.block(positions, joined, forward_batch), forward_batch)
        residual.clear(forward_batch)
        return output


class Step3p5MTPDraftModel(BorrowingDraft):
    """All layers. `bind_target` lends them the target's embedding after loading.

    A forward over windows (a verify, to SGLang) runs every layer over the last committed rows of each request, and
    `chooses` a proposal after each; one over a prefill only writes keys and values.

    Raises DraftConfigError for a config that is not served.
    """

    spec: MtpSpec
    edges = None  # between candidates: a layer scores its token given the one before
    has_own_head = True

    def __init__(self, config: Any, quant_config: Quantisation = None, prefix: str = "") -> None:
        """config: the target's, made one of these layers by `MtpSpec.make_alone`."""
        super().__init__()
        del quant_config  # of the target: `MtpSpec` has refused one
        self.config = config
        self.spec = MtpSpec.from_config(draft_config(config._name_or_path, getattr(config, "_commit_hash", None)))
        base = f"{prefix}." if prefix else ""
        made = (MtpLayer(config, i, f"{base}layers.{i}.") for i in range(self.spec.num_layers))
        self.layers = nn.ModuleList(made)
        self._prompt: Prompt | None = None
        self.serve_blocks_of(self.spec.block_size)

    def serve_blocks_of(self, block_size: int) -> None:
        """From now on a window's forward, or one that is captured, proposes the other tokens of blocks of this
        size; of 1 none."""
        self._proposed = block_size - 1

    def bind_target(self, target_model: nn.Module, recent: RecentRows) -> Borrowed:
        """Borrows the target's embedding; once, after loading. recent: what windows' rows read."""
        self._heads = [TargetHead(layer.lm_head) for layer in self.layers]
        self._recent = recent
        embedding, form = BlockEmbedding(find_embedding(target_model)), f"{len(self._heads)} of its own, as_is"
        self.borrowed = Borrowed(embedding, self._heads[0], head_copy=None, head_form=form)
        return self.borrowed

    def chooses(self, count: int, choose: Callable[[int, Candidates], Tensor]) -> None:
        """choose: layer i's proposals [bs] among the `count` likeliest tokens [bs, count], which the next layer
        reads."""
        self._count, self._choose = count, choose

    def reads(self, prompt: Prompt | None) -> None:
        """What the forwards over a prefill read from now on."""
        self._prompt = prompt

    def drafted(
        self, ids: Tensor, positions: Tensor, forward_batch: ForwardBatch, embedded: Tensor | None
    ) -> Tensor:
        """positions [rows]: of `RecentRows.window`, or of a prefill. Layers find their tokens themselves."""
        if forward_batch.forward_mode.is_target_verify():
            return self._propose(positions, forward_batch)
        assert self._prompt is not None
        hidden, embed = self._prompt.hidden, self._bound().embedding
        for layer, tokens in zip(self.layers, self._prompt.tokens, strict=True):
            hidden = layer(embed(tokens), hidden, positions, forward_batch)
        return hidden

    def _propose(self, positions: Tensor, forward_batch: ForwardBatch) -> Tensor:
        """All layers, because later windows read their keys and values; as many heads as there are proposals."""
        bs, requests, embed = forward_batch.batch_size, forward_batch.req_pool_indices, self._bound().embedding
        recent, rows = self._recent, positions.view(bs, -1)
        hidden, last = recent.hidden_of(requests, rows), recent.last[requests][:, None]
        for i, (layer, head) in enumerate(zip(self.layers, self._heads, strict=True)):
            tokens = recent.tokens_of(requests, rows + i + 1)
            hidden = layer(embed(tokens), hidden, positions, forward_batch)
            if i < self._proposed:
                row = hidden.view(*rows.shape, -1).take_along_dim(last[..., None], dim=1)[:, 0]
                candidates = head.likeliest(layer.head_norm(row.contiguous()), self._count)
                place = rows.take_along_dim(last, dim=1)[:, 0] + i + 2
                recent.set_proposed(requests, place, self._choose(i, candidates))
        return hidden

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Of a whole checkpoint of the target, these layers alone; the first time, all of them.

        Raises LoadError naming tensors that are missing, unexpected or of the wrong shape.
        """
        params, shards = dict(self.named_parameters()), dict[str, set[str | int | None]]()
        for name, tensor in weights:
            target, shard = self._place(name)
            if target is None:
                continue
            if target not in params:
                raise LoadError(
                    f"multi-token-prediction layers: unexpected tensor {name!r}. Expected those of SGLang's "
                    "layers. Serve this target without --speculative-algorithm DFLASH."
                )
            load_shard(params[target], name, tensor, shard, "multi-token-prediction layers")
            shards.setdefault(target, set()).add(shard)
        missing = [part for name in params for part in still_missing(name, shards.get(name, set()))]
        if missing and not self._loaded:
            raise LoadError(
                f"multi-token-prediction layers: {len(missing)} tensors are missing, such as {missing[0]!r} of "
                f"layer {self.spec.prefix(0)}*. Serve a checkpoint that holds all of them, or without "
                "--speculative-algorithm DFLASH."
            )
        self._loaded = True

    def _place(self, name: str) -> tuple[str | None, str | int | None]:
        """(parameter, shard) of a checkpoint's tensor; None: not of these layers."""
        for i in range(self.spec.num_layers):
            if name.startswith(self.spec.prefix(i)):
                own = name.removeprefix(self.spec.prefix(i)).removeprefix("transformer.")
                if own.startswith(_JOINING):
                    return f"layers.{i}.{own}", None
                for theirs, ours in _RENAMED.items():
                    if own.startswith(theirs):
                        return f"layers.{i}.{own.replace(theirs, ours, 1)}", None
                return stacked(f"layers.{i}.block.{own}")
        return None, None


EntryClass = [Step3p5MTPDraftModel]
