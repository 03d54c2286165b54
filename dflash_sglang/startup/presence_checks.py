"""Which tensors a dense draft's checkpoint lacks, has too many, or has in another shape than its config.json says.

The strict loader asks the same once more, after the target is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.dspark import GATED, RNN
from dflash_sglang.checkpoint.files import TensorFacts
from dflash_sglang.checkpoint.lilicorr import FEATURES, LiLiCorrSpec
from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING, TRAINING_TENSORS, VOCABULARY_TENSORS
from dflash_sglang.startup.facts import Problem
from dflash_sglang.startup.tensor_checks import MLA_MODULES, UNPACKED_DTYPES, layer_shapes

SAFETENSORS_FORMATS = ("auto", "safetensors")
"""Of --load-format: tensors have the names of the checkpoint."""
_STACKS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# Checked elsewhere: modules of the draft's own, and what the loader passes over or remaps.
_ELSEWHERE = ("lm_head.", "embed_tokens.", MASK_EMBEDDING, *VOCABULARY_TENSORS, *TRAINING_TENSORS)
_PASSED_OVER = (
    *(".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached"),
    *(".k_scale", ".v_scale", ".kv_scale", ".output_scale"),
)
_COMPLETE = "Use a complete checkpoint, or correct its config.json (layers, biases, sinks)."
_DENSE = ("F64", "F32", "F16", "BF16")
_NAMED = 4  # of many tensors


def presence_problems(spec: DraftSpec, features: int, tensors: Mapping[str, TensorFacts]) -> Iterator[Problem]:
    """features: layers of the target that `fc` joins. tensors: by name.

    Nothing is said of a checkpoint without tensors, of MLA layers, and of a quantised one, whose method decides on
    its tensors. ModelOpt may describe that in a file of its own, so dtypes tell it too.
    """
    quantised = spec.quantization is not None or any(
        facts.dtype not in _DENSE for name, facts in tensors.items() if "layers." in name
    )
    if not tensors or quantised or any(module in name for name in tensors for module in MLA_MODULES):
        return
    found = {name.removeprefix("model."): facts for name, facts in tensors.items()}
    shapes = dense_shapes(spec, features)
    expected = set(_taken(shapes, found))
    missing = sorted(expected - found.keys())
    if missing:
        yield Problem("draft tensors", None, f"{_listed(missing)} in the checkpoint", _COMPLETE)
    unknown = sorted(
        name
        for name in found.keys() - expected
        if not name.startswith(_ELSEWHERE) and not name.endswith(_PASSED_OVER)
    )
    if unknown:
        expectation = "only tensors of the draft that its config.json describes"
        fix = "Remove them, or correct config.json (layers, biases, sinks)."
        yield Problem("draft tensors", _listed(unknown), expectation, fix)
    of_layers = layer_shapes(spec)
    for name in sorted(expected & found.keys() - of_layers.keys() - {"fc.weight"}):  # those are checked elsewhere
        if found[name].dtype in UNPACKED_DTYPES and found[name].shape != shapes[name]:
            fix = "Make config.json and the checkpoint agree."
            expectation = f"{list(shapes[name])}, which config.json describes"
            yield Problem(f"draft tensor {name}", list(found[name].shape), expectation, fix)


def dense_shapes(spec: DraftSpec, features: int) -> dict[str, tuple[int, ...]]:
    """Shapes of every tensor that a dense checkpoint of this draft may hold, by name, without its own head,
    embedding, vocabulary and mask row. Of q, k, v and of gate, up both forms are there, single and stacked."""
    hidden = spec.hidden_size
    shapes = {"fc.weight": (hidden, features * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
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
        shapes |= {f"layers.{i}.layer_scalar": (1,) for i in range(spec.num_layers)}
    for layer in (f"layers.{i}" for i in range(spec.num_layers)):
        shapes |= {f"{layer}.{norm}.weight": (hidden,) for norm in norms}
        if spec.convolution is None:
            continue
        taps, groups = spec.convolution.taps, hidden // spec.convolution.group_size
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"{layer}.{conv}.base_kernel"] = (2, taps, hidden)
            shapes[f"{layer}.{conv}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if spec.dflash2 is not None:
        rank = spec.dflash2.selector_rank
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for codebook in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{codebook}"] = (spec.vocab_size, rank)
    if spec.dspark is not None and spec.dspark.rank:
        for matrix in ("markov_w1", "markov_w2"):
            shapes[f"markov_head.{matrix}.weight"] = (spec.vocab_size, spec.dspark.rank)
        rank = spec.dspark.rank
        if spec.dspark.kind == GATED:
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
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
    if spec.lilicorr is not None:
        head = _lilicorr_shapes(spec.lilicorr, hidden, spec.block_size)
        shapes |= {f"lilicorr.{name}": shape for name, shape in head.items()}
    return shapes


def _lilicorr_shapes(spec: LiLiCorrSpec, hidden: int, block_size: int) -> dict[str, tuple[int, ...]]:
    size, factor = spec.hidden_size, spec.factor_size
    linear = {
        **({"token_proj": (size, hidden)} if size != hidden else {}),
        "pass_hidden_proj": (size, hidden),
        "context_proj": (size, hidden),
        "feature_mlp.up_proj": (size, FEATURES),
        "feature_mlp.down_proj": (size, size),
        "factor_input_proj": (size, 3 * size),
        "out_head": (factor, size),
        "in_head": (factor, size),
        "anchor_out_head": (factor, size),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "feature_norm.weight": (FEATURES,),
        "feature_norm.bias": (FEATURES,),
        "slot_embedding": (1, 1, block_size - 1, 1, size),
        "rank_embedding": (1, 1, 1, spec.candidates, size),
        "relative_slot_bias": (spec.num_heads, 2 * block_size - 1),
        "same_slot_bias": (spec.num_heads,),
        "output_norm.weight": (size,),
        "anchor_norm.weight": (size,),
    }
    for layer in (f"layers.{i}" for i in range(spec.num_layers)):
        linear[f"{layer}.attn.out_proj"] = (size, size)
        linear[f"{layer}.mlp.up_proj"] = (spec.intermediate_size, size)
        linear[f"{layer}.mlp.down_proj"] = (size, spec.intermediate_size)
        shapes[f"{layer}.attn.in_proj_weight"] = (3 * size, size)
        shapes[f"{layer}.attn.in_proj_bias"] = (3 * size,)
        shapes |= {f"{layer}.{norm}.weight": (size,) for norm in ("attn_norm", "mlp_norm")}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _taken(names: Iterable[str], found: Mapping[str, TensorFacts]) -> Iterator[str]:
    """Of single and stacked forms the one that the checkpoint has: the stack where it is there."""
    for name in names:
        layer, kind = name.rpartition(".")[0], name.rpartition(".")[2]
        stack = next((s for s, parts in _STACKS.items() if layer.endswith((s, *parts))), None)
        if stack is None:
            yield name
            continue
        prefix = ".".join(layer.split(".")[:2])
        if layer.endswith(stack) == (f"{prefix}.{stack}.{kind}" in found):
            yield name


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
