"""Shapes of the tensors that a draft's checkpoint holds, as its config.json describes them."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_sglang.checkpoint.draft_spec import DraftSpec
from dflash_sglang.checkpoint.family_specs import GATED, RNN

STACKED: Mapping[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Module -> (module that stacks it, its shard there). Checkpoints have either form."""
RECOMPUTED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Rotary tables that some exporters save; RoPE is computed from the config."""
KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".output_scale")
"""Of a quantised KV cache, by exporters' names."""


def layer_shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """By checkpoint name, of whole tensors that are not packed."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.qkv_proj": (q + 2 * kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.gate_up_proj": (2 * mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    if spec.laguna is not None and spec.laguna.gates:
        matrices["self_attn.g_proj"] = (spec.num_heads * spec.laguna.gates, hidden)
    if spec.gemma4_layers:  # keys are values, too
        del matrices["self_attn.v_proj"], matrices["self_attn.qkv_proj"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    shapes |= {f"self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    shapes["self_attn.attention_sink_bias"] = (spec.num_heads,)
    return {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in shapes.items()}


def dense_shapes(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor that a dense checkpoint of this draft may hold, by name, without its own head,
    embedding, vocabulary and mask row. Of q, k, v and of gate, up both forms are there, single and stacked."""
    hidden, features = spec.hidden_size, len(spec.target_layer_ids)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, features * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {
        name: shape
        for name, shape in layer_shapes(spec).items()
        if not name.endswith(".bias") or (spec.attention_bias and ".self_attn." in name and "g_proj" not in name)
        if not name.endswith(".attention_sink_bias") or spec.attention_sinks
    }
    if spec.laguna is not None:
        shapes |= {f"aux_hidden_norms.{i}.weight": (hidden,) for i in range(features)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.gemma4_layers:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    of_layer: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in norms}
    if spec.gemma4_layers:
        of_layer["layer_scalar"] = (1,)
    if spec.convolution is not None:
        taps, groups = spec.convolution.taps, hidden // spec.convolution.group_size
        for conv in ("attention_conv", "mlp_conv"):
            of_layer[f"{conv}.base_kernel"] = (2, taps, hidden)
            of_layer[f"{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    shapes |= {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in of_layer.items()}
    if spec.dflash2 is not None:
        rank = spec.dflash2.selector_rank
        shapes |= {
            "candidate_selector.hidden_projection.weight": (rank, hidden),
            "candidate_selector.predecessor_codebook": (spec.vocab_size, rank),
            "candidate_selector.successor_codebook": (spec.vocab_size, rank),
        }
    if spec.dspark is not None and (rank := spec.dspark.rank):
        shapes["markov_head.markov_w1.weight"] = (spec.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (spec.vocabulary.draft_vocab_size or spec.vocab_size, rank)
        if spec.dspark.kind == GATED:
            shapes |= {
                "markov_head.gate_proj.weight": (rank, hidden + rank),
                "markov_head.gate_proj.bias": (rank,),
            }
        elif spec.dspark.kind == RNN:
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if spec.domino is not None:
        size, rank = spec.domino.state_size, spec.domino.rank
        shapes |= {
            "prefix_gru.weight_ih_l0": (3 * size, hidden),
            "prefix_gru.weight_hh_l0": (3 * size, size),
            "embed_proj.0.weight": (rank, hidden + size),
            "embed_proj.2.weight": (spec.vocab_size, rank),
        }
    return shapes
