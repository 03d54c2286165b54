"""The target's embedding and head as the draft borrows them, and the likeliest tokens of a sharded head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dflash_sglang.kernels.head.pack_shard import (
    AS_IS,
    Candidates,
    Scaling,
    best_ids,
    merge_best,
    merge_parts,
    merge_shards,
    pack_best,
    pack_shard,
)
from dflash_sglang.models.head.collectives import RowGather
from dflash_sglang.sglang_names.scheduler import should_apply_lm_head_quant_method, unwrap_lora_layer
from dflash_sglang.startup.facts import LoadError

_NESTED = ("language_model", "model", "text_model", "thinker", "llm")
_DENSE = (torch.float16, torch.bfloat16, torch.float32)


def find_embedding(target_model: nn.Module, same_batch: int | None = None) -> nn.Module:
    """The target's token embedding, unwrapped of LoRA, wherever the target nests it.

    same_batch: ranks that look up the same tokens, None for all.
    Raises ValueError where no `get_input_embeddings()` or `embed_tokens` gives a module, and for a table that is
    sharded over ranks with other tokens.
    """
    for model in _nested(target_model):
        getter = getattr(model, "get_input_embeddings", None)
        found = getter() if callable(getter) else getattr(model, "embed_tokens", None)
        if isinstance(found, nn.Module):
            table = unwrap_lora_layer(found)
            shards = getattr(table, "tp_size", 1)
            if same_batch is not None and shards > same_batch:
                raise LoadError(
                    f"{type(target_model).__name__} shards its embedding over {shards} ranks: expected at most "
                    f"{same_batch}, which have the same batch. Serve this target without --attn-dp-size."
                )
            return table
    raise LoadError(
        f"{type(target_model).__name__} has no token embedding for the draft: looked for "
        f"get_input_embeddings() and embed_tokens on the model and in {', '.join(_NESTED)}. "
        "Serve a target that has one."
    )


def find_head(target_model: nn.Module) -> nn.Module:
    """The target's LM head (the embedding where they are tied), unwrapped of LoRA, wherever it is nested.

    Raises ValueError where neither `lm_head` nor the owner of `get_embed_and_head()`'s weight is found.
    """
    for model in _nested(target_model):
        found = getattr(model, "lm_head", None)
        if isinstance(found, nn.Module):
            return unwrap_lora_layer(found)
    getter = getattr(target_model, "get_embed_and_head", None)
    if callable(getter):
        _, weight = getter()
        for module in target_model.modules():
            if weight is not None and getattr(module, "weight", None) is weight:
                return unwrap_lora_layer(module)
    raise LoadError(
        f"{type(target_model).__name__} has no LM head for the draft: looked for lm_head on the model and in "
        f"{', '.join(_NESTED)}, and for the module of get_embed_and_head()'s weight. "
        "Serve a target that has one."
    )


def _nested(model: nn.Module) -> Iterator[nn.Module]:
    """The model and the models nested in it, outermost first."""
    level = [model]
    while level:
        yield from level
        level = [
            inner
            for outer in level
            for name in _NESTED
            if isinstance(inner := getattr(outer, name, None), nn.Module)
        ]


class TargetHead:
    """Proposals with the target's head, dense or quantised, sharded over the vocabulary or not.

    lm_head: a ParallelLMHead, a tied VocabParallelEmbedding or a linear module with a weight [vocab, hidden].
    same_batch: ranks of the head's group that draft the same batch, None for all of them.
    scaling, target_ids: what `likeliest` makes of logits before the softmax, and of ids after it.
    Raises ValueError for a head whose weight is neither dense nor served by its quantisation method.
    """

    scaling: Scaling = AS_IS
    target_ids: Tensor | None = None

    def __init__(self, lm_head: nn.Module, same_batch: int | None = None) -> None:
        self.lm_head = lm_head
        weight: Any = getattr(lm_head, "weight", None)
        self.quantised = should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
        if not self.quantised and (weight is None or weight.dtype not in _DENSE):
            raise LoadError(
                f"the target's LM head ({type(lm_head).__name__}) has a weight of "
                f"{getattr(weight, 'dtype', None)}: expected float16, bfloat16 or float32, or a quantisation "
                "method that SGLang applies to heads. Serve a target with such a head."
            )
        shard = getattr(lm_head, "shard_indices", None)
        self.first_id: int = 0 if shard is None else shard.org_vocab_start_index
        # Rows of this rank's shard that are tokens; padding follows them.
        self.rows: int = weight.shape[0] if shard is None else shard.num_org_elements
        group = getattr(lm_head, "tp_group", None)
        self.group = group if group is not None and group.world_size > 1 else None
        # Of a head that is sharded over ranks with batches of their own.
        self.all_rows: RowGather | None = None
        if self.group is not None and same_batch is not None and same_batch < self.group.world_size:
            self.all_rows = RowGather(self.group, same_batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden] -> [N, rows] over this rank's tokens, without a gather."""
        if self.quantised:
            return self.lm_head.quant_method.apply(self.lm_head, hidden, None)[:, : self.rows]
        weight = self.lm_head.weight[: self.rows]
        return torch.matmul(hidden.to(weight.dtype), weight.T)

    def best(self, logits: Tensor) -> Tensor:
        """logits [N, rows] of this rank's tokens -> ids [N] int64 of the largest over the whole vocabulary, the
        lowest id among equals. Collective over the head's TP group; capturable in a CUDA graph."""
        if self.group is None:
            return best_ids(logits, self.first_id)
        return merge_shards(self._of_all_ranks(pack_shard(logits, self.first_id)).view(self.group.world_size, -1))

    @torch.no_grad()
    def likeliest(self, hidden: Tensor, count: int, out: Candidates | None = None) -> Candidates:
        """hidden [N, hidden] -> the `count` likeliest tokens of the whole vocabulary [N, count], of equal ones the
        lower id first. `out`, if given, is written. Collective as `best`, and over all data-parallel ranks where
        they share the head; capturable in a CUDA graph."""
        rows = hidden if self.all_rows is None else self.all_rows.gather(hidden)
        packed = pack_best(self.logits(rows), self.first_id, count, self.scaling)
        if self.group is not None:
            packed = self._of_all_ranks(merge_parts(packed, count))
        if self.all_rows is None:
            return merge_best(packed, count, self.scaling, self.target_ids, out)
        everyones = merge_best(packed, count, self.scaling, self.target_ids)
        own = Candidates(*(self.all_rows.own(of, len(hidden)) for of in everyones))
        if out is None:
            return own
        return Candidates(*(buffer.copy_(of) for buffer, of in zip(out, own, strict=True)))

    def _of_all_ranks(self, of_rank: Tensor) -> Tensor:
        """[n, ...] -> [ranks * n, ...]"""
        assert self.group is not None
        gathered = of_rank.new_empty((self.group.world_size * len(of_rank), *of_rank.shape[1:]))
        self.group.all_gather_into_tensor(gathered, of_rank.contiguous())
        return gathered
