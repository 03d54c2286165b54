"""The draft's training objective and a batched count of its accept lengths.

Objective (as published): blocks at random anchors of a sequence, each [anchor token, mask, mask, ...], over
the target's own features of the positions before the anchor; cross entropy against the target's own argmax,
weighted exp(-(k - 1) / 7) at the block's position k. A position counts only while the text before it in the
block is what the target would have chosen: after the first departure the labels are no longer the greedy
trajectory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.modeling import DraftModel, attention_biases

DECAY = 7.0


def block_logits(
    draft: DraftModel, target: Any, features: Tensor, ids: Tensor, anchors: Tensor, biases: list[Tensor]
) -> Tensor:
    """Proposal logits of the blocks at ``anchors`` in every sequence, with the target's embedding and head.

    features: [N, T, n_ids * hidden], ids: [N, T], anchors: [A] -> [N, A, block - 1, vocab].
    """
    size = draft.shape.block_size
    positions = anchors[:, None] + torch.arange(size, device=anchors.device)
    block = torch.full((len(ids), len(anchors), size), draft.shape.mask_token_id, device=ids.device)
    block[:, :, 0] = ids[:, anchors]
    context = draft.context_kv(features, torch.arange(ids.shape[1], device=ids.device))
    embeds = target.get_input_embeddings()(block).flatten(1, 2)
    hidden = draft(embeds, positions.flatten(), context, biases)
    return target.get_output_embeddings()(hidden.unflatten(1, (len(anchors), size))[:, :, 1:]).float()


def biases_for(draft: DraftModel, length: int, anchors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The score biases of the blocks at ``anchors`` over positions 0..length-1, one per layer."""
    size = draft.shape.block_size
    positions = (anchors[:, None] + torch.arange(size, device=anchors.device)).flatten()
    context = torch.arange(length, device=anchors.device)
    return [
        bias.to(dtype)
        for bias in attention_biases(draft.shape, context, positions, anchors.repeat_interleave(size))
    ]


def block_loss(
    draft: DraftModel,
    target: Any,
    features: Tensor,
    ids: Tensor,
    best: Tensor,
    anchors: Tensor,
    biases: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """(weighted cross entropy, mean accept length of the blocks, the bonus token counted).

    best: [N, T], the target's argmax after every position; anchors: [A], each <= T - block.
    """
    size = draft.shape.block_size
    logits = block_logits(draft, target, features, ids, anchors, biases)
    at = anchors[:, None] + torch.arange(1, size, device=anchors.device)
    labels, text = best[:, at - 1], ids[:, at]
    on_path = (text == labels).long().cumprod(-1)
    on_path = torch.cat((torch.ones_like(on_path[..., :1]), on_path[..., :-1]), dim=-1)
    weights = on_path * torch.exp(-torch.arange(size - 1, device=anchors.device) / DECAY)
    losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)
    hits = (logits.argmax(-1) == labels).long() * on_path
    return (losses * weights).sum() / weights.sum(), 1 + hits.cumprod(-1).sum(-1).float().mean()


@torch.no_grad()
def walk_accept_length(
    draft: DraftModel,
    target: Any,
    features: Tensor,
    ids: Tensor,
    prompt: int,
    tokens: int,
    block_sizes: tuple[int, ...],
) -> dict[int, float]:
    """Mean accept length over greedily generated sequences, stepping as the decoding loop does.

    ids: [N, T], T >= prompt + tokens + block; the text after ``prompt`` is the target's greedy continuation.
    """
    size = draft.shape.block_size
    anchors = torch.arange(prompt, prompt + tokens, device=ids.device)
    biases = biases_for(draft, ids.shape[1], anchors, features.dtype)
    logits = block_logits(draft, target, features, ids, anchors, biases)
    labels = ids[:, anchors[:, None] + torch.arange(1, size, device=ids.device)]
    agreed = (logits.argmax(-1) == labels).long().cumprod(-1).sum(-1).cpu()  # [N, tokens]
    means = {}
    for width in block_sizes:
        lengths = []
        for row in (agreed.clamp(max=width - 1) + 1).tolist():
            at = 0
            while at < tokens:
                lengths.append(row[at])
                at += row[at]
        means[width] = sum(lengths) / len(lengths)
    return means
