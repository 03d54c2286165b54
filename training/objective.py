"""The draft's training objective: blocks at random positions of answers, over the target's own features.

A block is an anchor token and mask tokens. It sees the features of the positions before its anchor. The label of
a position is the target's argmax after the text before it. A position counts while the text before it in the block
is what the target would have chosen: after the first departure the labels are no longer the greedy trajectory.

The weight of position k falls by exp(-(k - 1) / DECAY). A share REACHED of it is multiplied by how probable the
draft's own chain is to get there, since a proposal after a wrong one is never used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from training.modeling import DraftModel, DraftShape

DECAY = 7.0
REACHED = 0.8


def _visible(
    anchors: Tensor, size: int, length: int, causal: bool, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule of one layer: (row, head, query, key) -> whether the query sees the key, all of them indices."""

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor, inside, own = anchors[b, q // size], q % size, kv - length
        seen = torch.where(kv < length, kv < anchor, own // size == q // size)
        gap = anchor + inside - torch.where(kv < length, kv, anchor + own % size)
        if causal:
            seen = seen & (gap >= 0)
        return seen if window is None else seen & (gap.abs() < window)

    return visible


def masks_of(anchors: Tensor, shape: DraftShape, length: int, dense: bool = True) -> list[Tensor | BlockMask]:
    """What each layer's queries see of `length` context rows, then of their own rows.

    anchors: [R, A] -> per layer, of queries [R, A * block] and keys `length + A * block`, a score bias
    [R, 1, queries, keys] of 0 or -inf. Without `dense`, a mask for FlexAttention, whose gradients need a GPU.
    """
    rows, count = anchors.shape
    queries, keys = count * shape.block_size, length + count * shape.block_size
    made: dict[tuple[bool, int | None], Tensor | BlockMask] = {}
    windows = [shape.window if kind == "sliding_attention" else None for kind in shape.layer_types]
    for kind in zip(shape.causal, windows, strict=True):
        if kind in made:
            continue
        visible = _visible(anchors, shape.block_size, length, *kind)
        if dense:
            b, q, kv = (torch.arange(n, device=anchors.device) for n in (rows, queries, keys))
            b = b[:, None, None, None]
            seen = visible(b, b, q[:, None], kv)
            made[kind] = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))
        else:
            made[kind] = create_block_mask(visible, rows, None, queries, keys, anchors.device)
    return [made[kind] for kind in zip(shape.causal, windows, strict=True)]


def block_logits(
    draft: DraftModel,
    embed: nn.Module,
    head: nn.Module,
    features: Tensor,
    ids: Tensor,
    anchors: Tensor,
    masks: list[Tensor | BlockMask],
) -> Tensor:
    """Proposal logits of the blocks at `anchors`, with the target's embedding and head.

    features: [R, T, taps * hidden]; ids: [R, T]; anchors: [R, A]; masks: `masks_of` -> [R, A, block - 1, vocab].
    """
    at = anchors[..., None] + torch.arange(draft.shape.block_size, device=anchors.device)
    block = torch.full(at.shape, draft.shape.mask_token_id, device=ids.device)
    block[..., 0] = ids.gather(1, anchors)
    context = draft.context_kv(features, torch.arange(features.shape[1], device=ids.device))
    hidden = draft(embed(block.flatten(1)).to(features.dtype), at.flatten(1), context, masks)
    return head(hidden.unflatten(1, at.shape[1:])[:, :, 1:])


def labels_of(ids: Tensor, best: Tensor, lengths: Tensor, anchors: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The labels of blocks of `size` tokens, and which of them count: [R, A, size - 1] each, int64 and float32.

    ids, best: [R, T], best the target's argmax after each position; lengths: [R]; anchors: [R, A].
    """
    at = anchors[..., None] + torch.arange(1, size, device=anchors.device)
    inside = at < lengths[:, None, None]
    at = at.clamp(max=ids.shape[1] - 1)
    labels = best.gather(1, (at - 1).flatten(1)).view(at.shape)
    text = ids.gather(1, at.flatten(1)).view(at.shape)
    same = ((text == labels) & inside).float().cumprod(-1)
    return labels, torch.cat((torch.ones_like(same[..., :1]), same[..., :-1]), -1) * inside


class Objective(nn.Module):
    """Loss and accept length of blocks; a module, so that one compilation serves all of a run."""

    def __init__(self, draft: DraftModel, target: Any) -> None:
        super().__init__()
        self.draft, self.embed, self.head = draft, target.get_input_embeddings(), target.get_output_embeddings()

    def forward(
        self,
        features: Tensor,
        ids: Tensor,
        best: Tensor,
        lengths: Tensor,
        anchors: Tensor,
        masks: list[Tensor | BlockMask],
    ) -> tuple[Tensor, Tensor]:
        """(loss in nats, mean tokens that a block commits, both of shape ()). Shapes as in `block_logits`."""
        size = self.draft.shape.block_size
        labels, valid = labels_of(ids, best, lengths, anchors, size)
        logits = block_logits(self.draft, self.embed, self.head, features, ids, anchors, masks)
        losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none")
        losses = losses.view(labels.shape)
        chain = torch.exp(-losses.detach() * valid).cumprod(-1)  # the draft's chain is right so far
        before = torch.cat((torch.ones_like(chain[..., :1]), chain[..., :-1]), -1)
        fall = torch.exp(-torch.arange(size - 1, device=ids.device) / DECAY)
        weights = valid * fall * (1 - REACHED + REACHED * before)
        hits = (logits.argmax(-1) == labels) * valid
        length = 1 + hits.cumprod(-1).sum(-1).mean()
        return (losses * weights).sum() / weights.sum(), length.detach()
