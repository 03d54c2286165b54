"""Step-3.5 with its multi-token-prediction layers, and the reference of what they propose.

The checkpoint has the hub's form, which SGLang reads: one config.json whose per-layer lists cover the MTP layers,
and MTP tensors behind the target's in the same file. The reference loads the same file into the layers of
transformers.

The two disagree on `sliding_window`: transformers counts the query's own key, SGLang does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.support.tiny import write_checkpoint
from tests.zoo.member import LAYERS, TEXT

MTP_LAYERS = 3
FULL, SLIDING = "full_attention", "sliding_attention"
# Not in the hub's file. Without it, SGLang 0.5.23 reads one `num_attention_heads` of the config that transformers
# makes of this one, and fails: the number varies among layers.
FOR_SGLANG: Mapping[str, Any] = {"per_layer_config": {}}
TYPES = [FULL, SLIDING, SLIDING, SLIDING, FULL] + [SLIDING] * MTP_LAYERS
HEADS = {FULL: 4, SLIDING: 6}
WINDOW = 24  # sliding_window of config.json
SERVED_WINDOW = WINDOW + 1  # keys that a query of a sliding layer sees in SGLang, its own among them
EXPERTS, EXPERT_SIZE, SHARED_SIZE = 8, 32, 48
SPARSE = (2, 3, 4)
# Fields of TEXT that the config has otherwise, or under another name.
GIVEN = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings"}


def hub_config(types: Sequence[str] = TYPES, sizes: Mapping[str, Any] = TEXT) -> dict[str, Any]:
    """config.json: 5 layers, 2 dense and 3 sparse, gated heads, a clamped shared expert in the last layer.

    types: of the target's layers, then of the MTP layers. sizes: in place of TEXT.

    Routed experts are not clamped: SGLang's torch experts do not clamp.
    """
    text = {key: value for key, value in sizes.items() if key not in GIVEN}
    return dict(
        architectures=["Step3p5ForCausalLM"],
        model_type="step3p5",
        num_hidden_layers=len(types) - MTP_LAYERS,
        num_nextn_predict_layers=MTP_LAYERS,
        num_attention_heads=HEADS[FULL],
        num_attention_groups=sizes["num_key_value_heads"],
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        layer_types=list(types),
        attention_other_setting=dict(
            attention_type=SLIDING,
            num_attention_heads=HEADS[SLIDING],
            num_attention_groups=sizes["num_key_value_heads"],
            head_dim=sizes["head_dim"],
        ),
        use_head_wise_attn_gate=True,
        rope_theta=[500000.0 if kind == FULL else 10000.0 for kind in types],
        partial_rotary_factors=[0.5 if kind == FULL else 1.0 for kind in types],
        rope_scaling=dict(
            rope_type="llama3",
            low_freq_factor=1.0,
            factor=8.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        yarn_only_types=[FULL],
        moe_layers_enum=",".join(map(str, SPARSE)),
        use_moe_router_bias=True,
        need_fp32_gate=True,
        norm_expert_weight=True,
        swiglu_limits=[0.0] * len(types),
        torch_dtype="float32",
        sliding_window=WINDOW,
        moe_num_experts=EXPERTS,
        moe_top_k=2,
        moe_intermediate_size=EXPERT_SIZE,
        share_expert_dim=SHARED_SIZE,
        moe_router_scaling_factor=1.5,
        swiglu_limits_shared=[0.5 if i == LAYERS - 1 else 0.0 for i in range(len(types))],
        **text,
    )


def write(directory: Path, types: Sequence[str] = TYPES, sizes: Mapping[str, Any] = TEXT) -> Path:
    """Writes the checkpoint of `hub_config`: seeded weights that keep the scale of their input, float32."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        for name, shape in _shapes(types, sizes)
    }
    return write_checkpoint(directory, {**hub_config(types, sizes), **FOR_SGLANG}, tensors)


def _shapes(types: Sequence[str], sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)
    for i, kind in enumerate(types):
        for name, shape in _layer_shapes(i, kind, sizes):
            yield f"model.layers.{i}.{name}", shape
        if i >= LAYERS:
            for name in ("enorm", "hnorm", "transformer.shared_head.norm"):
                yield f"model.layers.{i}.{name}.weight", (hidden,)
            yield f"model.layers.{i}.eh_proj.weight", (hidden, 2 * hidden)
            yield f"model.layers.{i}.transformer.shared_head.output.weight", (vocab, hidden)


def _layer_shapes(i: int, kind: str, sizes: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, dim = sizes["hidden_size"], sizes["head_dim"]
    heads, kv_heads = HEADS[kind], sizes["num_key_value_heads"]
    yield "self_attn.q_proj.weight", (heads * dim, hidden)
    yield "self_attn.k_proj.weight", (kv_heads * dim, hidden)
    yield "self_attn.v_proj.weight", (kv_heads * dim, hidden)
    yield "self_attn.g_proj.weight", (heads, hidden)
    yield "self_attn.o_proj.weight", (hidden, heads * dim)
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", (dim,)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (hidden,)
    if i in SPARSE:
        yield "moe.gate.weight", (EXPERTS, hidden)
        yield "moe.router_bias", (EXPERTS,)
        yield from ((f"moe.{name}", (EXPERTS, *shape)) for name, shape in _mlp_shapes(hidden, EXPERT_SIZE))
        yield from ((f"share_expert.{name}", shape) for name, shape in _mlp_shapes(hidden, SHARED_SIZE))
    else:
        yield from ((f"mlp.{name}", shape) for name, shape in _mlp_shapes(hidden, sizes["intermediate_size"]))


def _mlp_shapes(hidden: int, size: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield "gate_proj.weight", (size, hidden)
    yield "up_proj.weight", (size, hidden)
    yield "down_proj.weight", (hidden, size)


class Reference(nn.Module):
    """The target and its MTP layers, made of transformers' layers, in float32. Every call reads the whole text."""

    def __init__(self, checkpoint: Path, window: int = SERVED_WINDOW) -> None:
        """window: keys that a query of a sliding layer sees, its own among them."""
        from transformers import Step3p7TextConfig
        from transformers.models.step3p7 import modeling_step3p7 as modeling

        super().__init__()
        self.window = window
        # One config of all layers, so that those of MTP are built as the target's are.
        read = json.loads((checkpoint / "config.json").read_text())
        self.types = types = read["layer_types"]
        hub = {name: value for name, value in read.items() if name not in FOR_SGLANG}
        config = Step3p7TextConfig(**{**hub, "num_hidden_layers": len(types), "num_nextn_predict_layers": 0})
        config._attn_implementation = "eager"
        tensors = load_file(checkpoint / "model.safetensors")

        def norm(name: str) -> nn.Module:
            made = modeling.Step3p7RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            made.weight.data.copy_(tensors[name])
            return made

        self.embedding = tensors["model.embed_tokens.weight"]
        self.rotary = modeling.Step3p7RotaryEmbedding(config)
        self.layers = nn.ModuleList(modeling.Step3p7DecoderLayer(config, i) for i in range(len(types)))
        for i, layer in enumerate(self.layers):
            layer.load_state_dict(_as_transformers_names(tensors, i))
        self.norm, self.head = norm("model.norm.weight"), tensors["lm_head.weight"]
        prefixes = [f"model.layers.{i}." for i in range(LAYERS, len(types))]
        self.enorms = nn.ModuleList(norm(f"{prefix}enorm.weight") for prefix in prefixes)
        self.hnorms = nn.ModuleList(norm(f"{prefix}hnorm.weight") for prefix in prefixes)
        self.projections = [tensors[f"{prefix}eh_proj.weight"] for prefix in prefixes]
        shared = [f"{prefix}transformer.shared_head." for prefix in prefixes]
        self.mtp_norms = nn.ModuleList(norm(f"{prefix}norm.weight") for prefix in shared)
        self.mtp_heads = [tensors[f"{prefix}output.weight"] for prefix in shared]

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """The target's hidden states before its final norm: ids [n] -> [n, hidden]."""
        rows = self.embedding[ids]
        for i in range(LAYERS):
            rows = self._layer(i, rows)
        return rows

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """The target's logits, ids [n] -> [n, vocab]."""
        return self.norm(self.hidden(ids)) @ self.head.T

    @torch.no_grad()
    def propose(self, ids: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The likeliest proposals of each MTP layer for a text ids [n], n > 1.

        chosen [MTP_LAYERS]: what later layers read in their place, by default the same.
        Returns tokens [MTP_LAYERS] and the logits they are the argmax of, [MTP_LAYERS, vocab].

        The text ends with a token that the target has not read: layer i (from 0) reads at position p the hidden
        state of the layer before and the token p + i + 1.
        """
        rows, tokens = self.hidden(ids[:-1]), ids[1:]
        logits: list[Tensor] = []
        for i in range(MTP_LAYERS):
            rows = self.mtp_rows(i, self.mtp_inputs(i, rows, tokens))
            logits.append(self.mtp_logits(i, rows[-1]))
            token = logits[-1].argmax(-1, keepdim=True) if chosen is None else chosen[i : i + 1]
            tokens = torch.cat([tokens[1:], token])
        return torch.stack(logits).argmax(-1), torch.stack(logits)

    @torch.no_grad()
    def mtp_inputs(self, i: int, rows: Tensor, tokens: Tensor) -> Tensor:
        """What the decoder layer of MTP layer i reads: rows [n, hidden] of the layer before and their tokens [n].

        Keys and values of a row depend on nothing else but its position.
        """
        both = torch.cat([self.enorms[i](self.embedding[tokens]), self.hnorms[i](rows)], dim=-1)
        return both @ self.projections[i].T

    @torch.no_grad()
    def mtp_rows(self, i: int, inputs: Tensor) -> Tensor:
        """Output of MTP layer i before its norm, for `mtp_inputs` of positions 0 to n - 1: [n, hidden]."""
        return self._layer(LAYERS + i, inputs)

    @torch.no_grad()
    def mtp_logits(self, i: int, row: Tensor) -> Tensor:
        """Logits [vocab] of a row [hidden] of `mtp_rows`."""
        return self.mtp_norms[i](row) @ self.mtp_heads[i].T

    def _layer(self, i: int, rows: Tensor) -> Tensor:
        positions = torch.arange(len(rows))
        distance = positions[:, None] - positions
        visible = distance >= 0
        if self.types[i] == SLIDING:
            visible &= distance < self.window
        mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
        embeddings = self.rotary(rows[None], positions[None], self.types[i])
        return self.layers[i](rows[None], attention_mask=mask[None, None], position_embeddings=embeddings)[0]


def _as_transformers_names(tensors: dict[str, Tensor], i: int) -> dict[str, Tensor]:
    """The tensors of decoder layer i, whose experts transformers stacks and names otherwise."""
    prefix = f"model.layers.{i}."
    layer = {name.removeprefix(prefix): tensors[name] for name in tensors if name.startswith(prefix)}
    if i not in SPARSE:
        beside = ("enorm", "hnorm", "eh_proj", "transformer.")
        return {name: tensor for name, tensor in layer.items() if not name.startswith(beside)}
    experts = {part: layer.pop(f"moe.{part}_proj.weight") for part in ("gate", "up", "down")}
    return {
        "mlp.gate.weight": layer.pop("moe.gate.weight"),
        "mlp.gate.e_score_correction_bias": layer.pop("moe.router_bias"),
        "mlp.experts.gate_up_proj": torch.cat([experts["gate"], experts["up"]], dim=1),
        "mlp.experts.down_proj": experts["down"],
        **{name.replace("share_expert.", "mlp.shared_experts."): tensor for name, tensor in layer.items()},
    }
