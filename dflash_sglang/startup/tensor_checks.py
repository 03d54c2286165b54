"""What can be wrong with the files and tensors of a draft: missing, or not as its config.json says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dflash_sglang.checkpoint import DraftSpec
from dflash_sglang.checkpoint.files import INDEX, TensorFacts, missing_files
from dflash_sglang.checkpoint.own_modules import MASK_EMBEDDING_FILE
from dflash_sglang.startup.facts import Problem

# Files of weights that SGLang reads from a directory, and formats of --load-format that need none there.
_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_ELSEWHERE = ("dummy", "remote", "remote_instance", "rdma", "ipc_cache", "private")
UNPACKED_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8")
MLA_MODULES = (".q_a_", ".q_b_", ".kv_a_", ".kv_b_")  # projections and norms of multi-head latent attention
MOST = 3  # tensors that are named: one wrong field of the config changes tensors of every layer


def weights_problems(path: str, directory: Path, load_format: str) -> Iterator[Problem]:
    """What of a draft's weights is missing.

    path: --speculative-draft-model-path; directory: its weights on this machine, of a hub repository those in
    safetensors; load_format: --speculative-draft-load-format as SGLang resolves it. Raises DraftConfigError for an
    index that is malformed.
    """
    if load_format in _ELSEWHERE:
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
