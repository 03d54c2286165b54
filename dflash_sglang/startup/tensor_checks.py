"""What can be wrong with the files and tensors of a draft: missing, too many, or not as its config.json says.

The strict loader asks the same of tensors once more, after the target is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import INDEX, UNPACKED_DTYPES, TensorFacts, missing_files
from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING, MASK_EMBEDDING_FILE, NOT_LOADED
from dflash_sglang.checkpoint.shapes import KV_SCALES, RECOMPUTED, STACKED, dense_shapes, layer_shapes
from dflash_sglang.startup.facts import Problem

# Files of weights that SGLang reads from a directory, and formats of --load-format that need none there.
_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_NO_FILES = ("dummy", "remote", "remote_instance", "rdma", "ipc_cache", "private")
MLA_MODULES = (".q_a_", ".q_b_", ".kv_a_", ".kv_b_")  # projections and norms of multi-head latent attention
MOST = 3  # tensors that are named: one wrong field of the config changes tensors of every layer
_MOST_LISTED = 4  # of those that are missing, or too many
SAFETENSORS_FORMATS = ("auto", "safetensors")
"""Of --load-format: tensors have the names of the checkpoint."""
# Checked elsewhere: modules of the draft's own, and what the loader passes over or remaps.
_ELSEWHERE, _PASSED_OVER = ("lm_head.", "embed_tokens.", MASK_EMBEDDING, *NOT_LOADED), RECOMPUTED + KV_SCALES
_COMPLETE = "Use a complete checkpoint, or correct its config.json (layers, biases, sinks)."
_AGREE = "Make config.json and the checkpoint agree."
_DENSE = {"F64", "F32", "F16", "BF16"}


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
        fix = "Download them; the download may have been cut short."
        yield Problem(f"draft file {INDEX}", missing, f"the files that it names in {directory}", fix)
    found = {file.name for pattern in _FILES for file in directory.glob(pattern)} - {MASK_EMBEDDING_FILE}
    if Path(path).is_dir() and not found and not missing:
        expected = f"weights beside its config.json ({', '.join(_FILES)})"
        yield Problem("--speculative-draft-model-path", path, expected, "Download them too.")


def shape_problems(spec: DraftSpec, tensors: Mapping[str, TensorFacts]) -> Iterator[Problem]:
    """SGLang's loaders of sharded layers take the part that they need of a larger tensor, without a word. Of MLA
    layers, which are another kind, one tensor is named for all."""
    mla = next((name for name in tensors if any(f".self_attn{module}" in name for module in MLA_MODULES)), None)
    if mla is not None:
        expected = "none of multi-head latent attention (MLA): no worker has it for drafts"
        fix = "Serve a draft trained with grouped-query attention."
        yield Problem(f"draft tensor {mla}", list(tensors[mla].shape), expected, fix)
    shapes, layers = dense_shapes(spec), layer_shapes(spec)
    of_layers, others = list[Problem](), list[Problem]()
    for name, found in tensors.items():
        own = name.removeprefix("model.")
        shape = layers.get(own, shapes.get(own, found.shape))
        if found.dtype not in UNPACKED_DTYPES or found.shape == shape:
            continue  # packed: the loader knows the quantisation's layout
        said, fix = ", which config.json describes", _AGREE
        if own in layers:
            said = (
                f": hidden_size {spec.hidden_size}, intermediate_size {spec.intermediate_size}, "
                f"{spec.num_heads} heads and {spec.num_kv_heads} key-value heads of {spec.head_dim}"
            )
        elif own == "fc.weight":
            said = f": [hidden_size, {len(spec.target_layer_ids)} target layers x hidden_size]"
            named, _ = spec.named_layer_ids(spec.target_layer_ids)
            fix = f"Make {named} name the layers the checkpoint was trained on."
        field = f"draft tensor {name if own in layers else own}"
        problem = Problem(field, list(found.shape), f"{list(shape)}{said}", fix)
        (of_layers if own in layers else others).append(problem)
    rest = f" {len(of_layers) - MOST} more tensors do not fit." if len(of_layers) > MOST else ""
    yield from (replace(problem, fix=f"{_AGREE}{rest}") for problem in of_layers[:MOST])
    yield from others


def presence_problems(spec: DraftSpec, tensors: Mapping[str, TensorFacts]) -> Iterator[Problem]:
    """Tensors that are missing, or too many.

    Nothing is said of a checkpoint without tensors, of MLA layers, and of a quantised one, whose method decides on
    its tensors. ModelOpt may describe that in a file of its own, so dtypes tell it too.
    """
    of_layers = [facts.dtype for name, facts in tensors.items() if "layers." in name]
    quantised = spec.quantization is not None or not set(of_layers) <= _DENSE
    if not tensors or quantised or any(module in name for name in tensors for module in MLA_MODULES):
        return
    found = {name.removeprefix("model.") for name in tensors}
    expected = {name for name in dense_shapes(spec) if _is_taken(name, found)}
    if missing := expected - found:
        yield Problem("draft tensors", None, f"{_listed(missing)} in the checkpoint", _COMPLETE)
    others = found - expected
    unknown = {one for one in others if not one.startswith(_ELSEWHERE) and not one.endswith(_PASSED_OVER)}
    if unknown:
        described = "only tensors of the draft that its config.json describes"
        fix = "Remove them, or correct config.json (layers, biases, sinks)."
        yield Problem("draft tensors", _listed(unknown), described, fix)


def _is_taken(name: str, found: Set[str]) -> bool:
    """Of single and stacked forms the checkpoint has one: the stack where it is there."""
    for module, (stack, _) in STACKED.items():
        if f".{stack}." in name:
            return name in found
        if f".{module}." in name:
            return name.replace(module, stack) not in found
    return True


def _listed(names: Set[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(sorted(names)[:_MOST_LISTED]) + more
