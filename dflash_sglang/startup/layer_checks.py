"""The shapes that a draft's config.json gives the tensors of its layers, and which tensors have others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.startup.facts import Problem

UNPACKED_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8")
MLA_MODULES = (".q_a_", ".q_b_", ".kv_a_", ".kv_b_")  # projections and norms of multi-head latent attention
MOST = 3  # tensors that are named: one wrong field of the config changes tensors of every layer


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
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    shapes |= {f"self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    shapes["self_attn.attention_sink_bias"] = (spec.num_heads,)
    return {f"layers.{i}.{name}": shape for i in range(spec.num_layers) for name, shape in shapes.items()}


def layer_problems(spec: DraftSpec, tensors: Mapping[str, TensorFacts]) -> Iterator[Problem]:
    """SGLang's loaders of sharded layers take the part that they need of a larger tensor, without a word. Of MLA
    layers, which are another kind, one tensor is named for all."""
    mla = next((name for name in tensors if any(f".self_attn{module}" in name for module in MLA_MODULES)), None)
    if mla is not None:
        yield Problem(
            f"draft tensor {mla}",
            list(tensors[mla].shape),
            "none of multi-head latent attention (MLA): no worker has it for drafts",
            "Serve a draft trained with grouped-query attention.",
        )
    shapes = layer_shapes(spec)
    misfits = [
        (name, found.shape, shapes[own])
        for name, found in tensors.items()
        if (own := name.removeprefix("model.")) in shapes
        and found.dtype in UNPACKED_DTYPES  # packed: the loader knows the quantisation's layout
        and found.shape != shapes[own]
    ]
    rest = f" {len(misfits) - MOST} more tensors do not fit." if len(misfits) > MOST else ""
    for name, found, expected in misfits[:MOST]:
        yield Problem(
            f"draft tensor {name}",
            list(found),
            f"{list(expected)}: hidden_size {spec.hidden_size}, intermediate_size {spec.intermediate_size}, "
            f"{spec.num_heads} heads and {spec.num_kv_heads} key-value heads of {spec.head_dim}",
            f"Make config.json and the checkpoint agree.{rest}",
        )
