"""Random-weight Qwen3 target and DFlash draft, small enough for any test; seeded, float32, no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPE: dict[str, Any] = dict(
    model_type="qwen3",
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=320,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    attention_bias=False,
    hidden_act="silu",
    tie_word_embeddings=False,
    torch_dtype="float32",
    bos_token_id=1,
    eos_token_id=2,
)


def target_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the target: Qwen3, 5 layers."""
    return {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 5, **overrides}


def draft_config(**overrides: Any) -> dict[str, Any]:
    """config.json of the draft: a sliding and a full layer, block 8, features of target layers 1, 3 and 4.

    `dflash_config` is merged key by key; an override of None removes the key.
    """
    nested = {
        "mask_token_id": 3,
        "target_layer_ids": [1, 3, 4],
        **(overrides.pop("dflash_config", None) or {}),
    }
    config = {
        **SHAPE,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "num_target_layers": 5,
        "block_size": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "dflash_config": {key: value for key, value in nested.items() if value is not None},
        **overrides,
    }
    return {key: value for key, value in config.items() if value is not None}


def target_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    make = _Maker(seed)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": make.matrix(vocab, hidden),
        "model.norm.weight": make.norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = make.matrix(vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        tensors |= make.layer(config, f"model.layers.{i}.")
    return tensors


def draft_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, torch.Tensor]:
    make = _Maker(seed)
    hidden = config["hidden_size"]
    features = len(config["dflash_config"]["target_layer_ids"])
    tensors = {
        "fc.weight": make.matrix(hidden, features * hidden),
        "hidden_norm.weight": make.norm(hidden),
        "norm.weight": make.norm(hidden),
    }
    for i in range(config["num_hidden_layers"]):
        tensors |= make.layer(config, f"layers.{i}.")
    return tensors


def write_checkpoint(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_pair(
    directory: str | Path,
    *,
    seed: int = 0,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
) -> tuple[Path, Path]:
    """Writes DIRECTORY/target and DIRECTORY/draft; `target` and `draft` override fields of the configs."""
    directory = Path(directory)
    of_target = target_config(**(target or {}))
    of_draft = draft_config(**(draft or {}))
    return (
        write_checkpoint(directory / "target", of_target, target_tensors(of_target, seed)),
        write_checkpoint(directory / "draft", of_draft, draft_tensors(of_draft, seed + 1)),
    )


class _Maker:
    """Seeded weights: matrices that keep the scale of their input, norms around 1."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.generator) * columns**-0.5

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=self.generator)

    def layer(self, config: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
        hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        shapes = {
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv_heads * dim, hidden),
            "self_attn.v_proj": (kv_heads * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        tensors = {f"{prefix}{name}.weight": self.matrix(*shape) for name, shape in shapes.items()}
        if config["attention_bias"]:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                rows = shapes[f"self_attn.{name}"][0]
                tensors[f"{prefix}self_attn.{name}.bias"] = self.norm(rows) - 1
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{prefix}{name}.weight"] = self.norm(dim)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = self.norm(hidden)
        return tensors
