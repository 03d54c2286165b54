"""DSpark drafts of Gemma 4's layers in plain PyTorch: transformers' own decoder layers, norms, rope and embedding.

Context and block meet where a layer updates its cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig
from transformers.models.gemma4 import modeling_gemma4 as gemma4

from tests.support.reference_dspark import RANK, ReferenceDSpark, added_tensors

ContextKV = list[tuple[Tensor, Tensor]]


def gemma4_config(**overrides: Any) -> dict[str, Any]:
    """config.json of a tiny draft with the fields of the published one. `tiny.target_config`'s target fits it."""
    full = dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e4)
    sliding = dict(rope_type="default", rope_theta=1e3)
    layers = overrides.get("num_hidden_layers", 2)
    config = dict(
        architectures=["Gemma4DSparkModel"], model_type="gemma4_text", dtype="float32", vocab_size=320,
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, layer_types=["full_attention"] * layers,
        num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=16,
        global_head_dim=32, attention_bias=False, attention_k_eq_v=True, sliding_window=16, rms_norm_eps=1e-6,
        use_bidirectional_attention="vision", num_kv_shared_layers=0, hidden_size_per_layer_input=0,
        enable_moe_block=False,
        hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=30.0, tie_word_embeddings=False,
        rope_parameters=dict(full_attention=full, sliding_attention=sliding, rope_theta=None, rope_type="default"),
        max_position_embeddings=4096, block_size=7, mask_token_id=3, target_layer_ids=[1, 3, 4],
        num_target_layers=5, target_model_type="gemma4_unified", markov_head_type="vanilla", markov_rank=RANK,
        enable_confidence_head=True, confidence_head_with_markov=True,
    )  # fmt: skip
    return {**config, **overrides}


def gemma4_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights whose norms and scalars change their input."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, of_class in Gemma4Draft(config).state_dict().items():
        noise = torch.randn(of_class.shape, generator=generator)
        tensors[name] = noise * of_class.shape[-1] ** -0.5 if of_class.ndim == 2 else 1 + 0.1 * noise
    return {**tensors, **added_tensors(config, seed)}


class Gemma4Draft(nn.Module):
    """State-dict names are the checkpoint's, without the Markov and the confidence head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        theirs = Gemma4TextConfig(**{name: value for name, value in config.items() if name != "architectures"})
        theirs._attn_implementation = "eager"
        hidden, self.theirs = theirs.hidden_size, theirs
        self.embed_tokens = gemma4.Gemma4TextScaledWordEmbedding(theirs.vocab_size, hidden, None, hidden**0.5)
        self.lm_head = nn.Linear(hidden, theirs.vocab_size, bias=False)
        self.fc = nn.Linear(len(config["target_layer_ids"]) * hidden, hidden, bias=False)
        self.hidden_norm = gemma4.Gemma4RMSNorm(hidden, eps=theirs.rms_norm_eps)
        self.layers = nn.ModuleList(
            gemma4.Gemma4TextDecoderLayer(theirs, i) for i in range(theirs.num_hidden_layers)
        )
        self.norm = gemma4.Gemma4RMSNorm(hidden, eps=theirs.rms_norm_eps)
        self.rotary_emb = gemma4.Gemma4TextRotaryEmbedding(theirs)

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary_emb(self.norm.weight, positions[None], layer_type="full_attention")

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        rows, (cos, sin) = self.hidden_norm(self.fc(features)), self.turns(positions)
        found = []
        for attention in (layer.self_attn for layer in self.layers):
            heads = attention.k_proj(rows).unflatten(-1, (-1, attention.head_dim))[None]
            keys = gemma4.apply_rotary_pos_emb(attention.k_norm(heads), cos, sin, unsqueeze_dim=2)
            found.append((keys[0], attention.v_norm(heads)[0]))
        return found

    def forward(self, embeds: Tensor, positions: Tensor, context: ContextKV) -> Tensor:
        """embeds [B, hidden] of a block, scaled -> rows after the final norm; every row sees the whole block."""

        def joined(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, ...]:
            pairs = zip(context[layer], (keys, values), strict=True)
            return tuple(torch.cat((known.transpose(0, 1)[None], own), dim=2) for known, own in pairs)

        hidden = embeds[None]
        for layer in self.layers:
            hidden = layer(
                hidden,
                shared_kv_states={},
                position_embeddings=self.turns(positions),
                past_key_values=SimpleNamespace(update=joined),
            )
        return self.norm(hidden)[0]

    def logits(self, rows: Tensor) -> Tensor:
        cap = self.theirs.final_logit_softcapping
        return cap * torch.tanh(self.lm_head(rows) / cap)


class ReferenceGemma4(ReferenceDSpark):
    """Proposals and scores of a Markov head over these rows, whose logits are `model.logits`."""

    model: Any

    def __init__(self, model: Gemma4Draft) -> None:
        self.model = model.eval()

    @classmethod
    def from_weights(cls, config: Any, weights: Any) -> ReferenceGemma4:
        model = Gemma4Draft(config)
        reference = cls(model)
        reference.head = model.logits
        heads = ("markov_head.", "confidence_head.")
        model.load_state_dict({name: w.float() for name, w in weights.items() if not name.startswith(heads)})
        reference.w1, reference.w2 = (weights[f"markov_head.markov_{one}.weight"].float() for one in ("w1", "w2"))
        return reference

    @torch.no_grad()
    def block(self, block_embeds: Tensor, positions: Tensor, context_kv: Any, *_: Any) -> Tensor:
        return self.model(block_embeds, positions, context_kv)
