"""Reads a draft checkpoint of any format with plain PyTorch, and proposes with it; shares no code with ours.

The draft itself is `training.modeling`'s; here are the formats around it and what a draft has of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from training.modeling import Attention, DraftModel
from training.reference import ReferenceDraft


class SinkAttention(Attention):
    """Attention whose heads may attend to nothing: exp(sink) in the denominator of each softmax."""

    def __init__(self, shape: Any, layer: int) -> None:
        super().__init__(shape, layer)
        self.attention_sink_bias = nn.Parameter(torch.zeros(shape.num_heads))

    def forward(self, rows: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        shape = self.shape
        q = self._rotate(self.q_norm(self.q_proj(rows).unflatten(-1, (shape.num_heads, -1))), positions)
        own_k, own_v = self.keys_values(rows, positions)
        outputs = []
        for head in range(shape.num_heads):
            kv_head = head * shape.num_kv_heads // shape.num_heads
            k = torch.cat((context[0], own_k))[:, kv_head]
            v = torch.cat((context[1], own_v))[:, kv_head]
            weights = (q[:, head] @ k.T / shape.head_dim**0.5 + bias).exp()
            total = weights.sum(-1, keepdim=True) + self.attention_sink_bias[head].exp()
            outputs.append(weights / total @ v)
        return self.o_proj(torch.cat(outputs, dim=-1))


@dataclass
class FormatReference:
    """A checkpoint as this reader understands it; what is None is the target's."""

    draft: ReferenceDraft
    embedding: Tensor | None  # [vocabulary, hidden]
    head: Tensor | None  # [draft vocabulary, hidden]
    d2t: Tensor | None
    mask_row: Tensor | None
    embedding_scale: float
    multiplier: float
    softcap: float | None

    @staticmethod
    def load(directory: Path) -> FormatReference:
        config = json.loads((directory / "config.json").read_text())
        tensors = {
            name.removeprefix("model."): tensor.float() if tensor.is_floating_point() else tensor
            for file in sorted(directory.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        if "transformer_layer_config" in config:
            config = {
                **config["transformer_layer_config"],
                "block_size": config["block_size"],
                "sliding_window_non_causal": config["sliding_window_non_causal"],
                "dflash_config": {
                    "mask_token_id": config["mask_token_id"],
                    "target_layer_ids": [i - 1 for i in config["aux_hidden_state_layer_ids"]],
                },
            }
        nested = config["dflash_config"]
        own = {
            name: tensors.pop(name, None)
            for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d", "mask_embedding")
        }
        mask_row = own["mask_embedding"]
        if (directory / "mask_embedding.pt").exists():
            saved = torch.load(directory / "mask_embedding.pt", weights_only=True)
            mask_row = saved["embedding"] if isinstance(saved, dict) else saved
        model = DraftModel(config)
        if nested.get("attention_sink_bias"):
            for i, layer in enumerate(model.layers):
                layer.self_attn = SinkAttention(model.shape, i)
        model.load_state_dict(tensors, strict=True)
        return FormatReference(
            ReferenceDraft(model),
            own["embed_tokens.weight"],
            own["lm_head.weight"],
            own["d2t"],
            None if mask_row is None else mask_row.float().flatten(),
            nested.get("input_embedding_scale", 1.0),
            nested.get("output_multiplier", 1.0),
            nested.get("final_logit_softcapping"),
        )

    def embeds(self, last_token: int, target_table: Tensor) -> Tensor:
        """[block, hidden] of a last committed token and the masks after it."""
        shape = self.draft.shape
        table = target_table if self.embedding is None else self.embedding
        mask = table[shape.mask_token_id] if self.mask_row is None else self.mask_row
        return torch.stack([table[last_token]] + [mask] * (shape.block_size - 1)) * self.embedding_scale

    def logits(self, hidden: Tensor, target_head: Tensor, vocab_size: int) -> Tensor:
        """hidden [N, hidden] -> [N, vocab_size] by the target's ids, -inf where the draft does not know one."""
        logits = hidden @ (target_head if self.head is None else self.head).T * self.multiplier
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.head is None or self.d2t is None:
            return logits
        spread = torch.full((len(hidden), vocab_size), float("-inf"))
        for row, offset in enumerate(self.d2t.tolist()):
            spread[:, row + offset] = logits[:, row]
        return spread
