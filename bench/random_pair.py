"""Random weights in the shapes of Qwen3-8B and a 5-layer, block-16 draft of it: for step time, not acceptance.

python -m bench.random_pair DIRECTORY [--layers 36]   ->  DIRECTORY/target (16.4 GB), DIRECTORY/draft (2.1 GB)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_LAYERS, BLOCK = 4096, 12288, 32, 8, 128, 151936, 5, 16
MASK_TOKEN_ID = 151669
SHAPE: dict[str, Any] = dict(
    model_type="qwen3", hidden_size=HIDDEN, intermediate_size=MLP, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=VOCAB, rms_norm_eps=1e-6, rope_theta=1e6,
    max_position_embeddings=40960, torch_dtype="bfloat16", attention_bias=False, tie_word_embeddings=False,
    hidden_act="silu", bos_token_id=151643, eos_token_id=151645,
)  # fmt: skip


def matrix(rows: int, columns: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(rows, columns, device=device) * 0.02).bfloat16().cpu()


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def layer(prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of one decoder layer."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        f"{attention}.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        f"{attention}.q_norm.weight": ones(HEAD_DIM),
        f"{attention}.k_norm.weight": ones(HEAD_DIM),
        f"{mlp}.gate_proj.weight": matrix(MLP, HIDDEN),
        f"{mlp}.up_proj.weight": matrix(MLP, HIDDEN),
        f"{mlp}.down_proj.weight": matrix(HIDDEN, MLP),
        f"{prefix}.input_layernorm.weight": ones(HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
    }


def save(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=36, help="of the target")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    target = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": ones(HIDDEN),
    }
    for i in range(arguments.layers):
        target |= layer(f"model.layers.{i}")
    save(
        arguments.directory / "target",
        target,
        {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": arguments.layers},
    )
    ids = [1 + i * (arguments.layers - 4) // (DRAFT_LAYERS - 1) for i in range(DRAFT_LAYERS)]
    draft = {name: ones(HIDDEN) for name in ("hidden_norm.weight", "norm.weight")}
    draft["fc.weight"] = matrix(HIDDEN, len(ids) * HIDDEN)
    for i in range(DRAFT_LAYERS):
        draft |= layer(f"layers.{i}")
    save(
        arguments.directory / "draft",
        draft,
        {
            **SHAPE,
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": DRAFT_LAYERS,
            "num_target_layers": arguments.layers,
            "block_size": BLOCK,
            "layer_types": ["full_attention"] * DRAFT_LAYERS,
            "dflash_config": {"target_layer_ids": ids, "mask_token_id": MASK_TOKEN_ID},
        },
    )


if __name__ == "__main__":
    main()
