"""Batched operations of the small pair's target: loss, and generation in bulk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3ForCausalLM

from training.data import PAD
from training.modeling import rotate

THETA = 10000.0


def logits_of(model: Qwen3ForCausalLM, residual: Tensor) -> Tensor:
    """The head's logits, float32, [..., vocab]."""
    return model.lm_head(model.model.norm(residual)).float()


def language_loss(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats. ids: [N, T + 1]."""
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class BulkGenerator:
    """Continues N prompts of one common length, one token a step, over a dense KV cache."""

    def __init__(self, model: Qwen3ForCausalLM, rows: int, length: int, dtype: torch.dtype) -> None:
        config = model.config
        self.model, self.length, self.dtype = model, length, dtype
        device = model.lm_head.weight.device
        shape = (rows, config.num_key_value_heads, length, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

    def _forward(self, ids: Tensor, start: int) -> Tensor:
        """ids: [N, T] at positions start.. -> logits of the last row, [N, vocab]."""
        body: Any = self.model.model
        config = self.model.config
        stop = start + ids.shape[1]
        positions = torch.arange(start, stop, device=ids.device)
        h = body.embed_tokens(ids)
        for index, layer in enumerate(body.layers):
            attn = layer.self_attn
            x = layer.input_layernorm(h)
            heads = (-1, config.head_dim)
            q = attn.q_norm(attn.q_proj(x).unflatten(-1, heads))
            k = attn.k_norm(attn.k_proj(x).unflatten(-1, heads))
            q, k = (rotate(t, positions, THETA, config.head_dim, True) for t in (q, k))
            v = attn.v_proj(x).unflatten(-1, heads)
            self.keys[index][:, :, start:stop] = k.transpose(1, 2)
            self.values[index][:, :, start:stop] = v.transpose(1, 2)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2).to(self.dtype),
                self.keys[index][:, :, :stop],
                self.values[index][:, :, :stop],
                is_causal=start == 0,
                enable_gqa=True,
            )
            h = h + attn.o_proj(out.transpose(1, 2).flatten(-2).to(h.dtype))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        return logits_of(self.model, h[:, -1])

    @torch.no_grad()
    def run(self, prompts: Tensor, pick: Callable[[Tensor, int], Tensor]) -> Tensor:
        """prompts: [N, P] -> [N, length]; pick(logits [N, PAD], step) -> the next ids [N], all below PAD."""
        ids = prompts.new_zeros(len(prompts), self.length)
        ids[:, : prompts.shape[1]] = prompts
        logits = self._forward(prompts, 0)
        for position in range(prompts.shape[1], self.length):
            ids[:, position] = pick(logits[:, :PAD], position - prompts.shape[1])
            if position + 1 < self.length:
                logits = self._forward(ids[:, position : position + 1], position)
        return ids


def greedy_with_breaks(rows: int, device: torch.device, temperature: float) -> Callable[[Tensor, int], Tensor]:
    """A pick rule: greedy for 176 tokens, then sampled for 48, and again.

    Half the rows begin with the greedy stretch, the others at a random phase. The sampled stretches take the
    sequence out of the loops that greedy decoding of a small model falls into.
    """
    phase = torch.randint(0, 224, (rows,), device=device)
    phase[: rows // 2] = 0

    def pick(logits: Tensor, step: int) -> Tensor:
        sampled = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)[:, 0]
        return torch.where((phase + step) % 224 < 176, logits.argmax(-1), sampled)

    return pick


def greedy(logits: Tensor, step: int) -> Tensor:
    """The pick rule of greedy decoding."""
    return logits.argmax(-1)
