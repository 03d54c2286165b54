"""What can be wrong with the files and tensors of a draft: missing, too many, or not as its config.json says.

The strict loader asks the same of tensors once more, after the target is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import INDEX, UNPACKED_DTYPES, TensorFacts, missing_files
from dflash_sglang.checkpoint.own_modules import (
    MASK_EMBEDDING,
    MASK_EMBEDDING_FILE,
    TRAINING_TENSORS,
    VOCABULARY_TENSORS,
)
from dflash_sglang.checkpoint.shapes import dense_shapes, layer_shapes
from dflash_sglang.startup.facts import Problem

# Files of weights that SGLang reads from a directory, and formats of --load-format that need none there.
_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_NO_FILES = ("dummy", "remote", "remote_instance", "rdma", "ipc_cache", "private")
MLA_MODULES = (".q_a_", ".q_b_", ".kv_a_", ".kv_b_")  # projections and norms of multi-head latent attention
MOST = 3  # tensors that are named: one wrong field of the config changes tensors of every layer
_MOST_LISTED = 4  # of those that are missing, or too many
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


def weights_problems(path: str, directory: Path, load_format: str) -> Iterator[Problem]:
    """What of a draft's weights is missing.

    path: --speculative-draft-model-path; directory: its weights on this machine, of a hub repository those in
    safetensors; load_format: --speculative-draft-load-format as SGLang resolves it. Raises DraftConfigError for an
    index that is malformed.
    """
    if load_format in _NO_FILES:
        return
    missing = missing_files(directory)
    if missing:
        yield Problem(
            f"draft file {INDEX}",
            missing,
            f"the files that it names in {directory}",
            "Download them; the download may have been cut short.",
        )
    found = {file.name for pattern in _FILES for file in directory.glob(pattern)} - {MASK_EMBEDDING_FILE}
    if Path(path).is_dir() and not found and not missing:
        yield Problem(
            "--speculative-draft-model-path",
            path,
            f"weights beside its config.json ({', '.join(_FILES)})",
            "Download them too.",
        )


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


def fc_problems(spec: DraftSpec, ids: tuple[int, ...], tensors: Mapping[str, TensorFacts]) -> Iterator[Problem]:
    fc = tensors.get("fc.weight") or tensors.get("model.fc.weight")
    if fc is None or fc.dtype not in UNPACKED_DTYPES:
        return  # absent or packed: the loader knows the quantisation's layout and checks it
    expected = (spec.hidden_size, len(ids) * spec.hidden_size)
    if fc.shape != expected:
        yield Problem(
            "draft tensor fc.weight",
            list(fc.shape),
            f"{list(expected)}: [hidden_size, {len(ids)} target layers x hidden_size]",
            f"Make {spec.named_layer_ids(ids)[0]} name the layers the checkpoint was trained on.",
        )


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
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
