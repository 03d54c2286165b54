"""A target that says the same of any text as the packaged one, with other hidden states."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def another_target(checkpoint: Path, directory: Path) -> Path:
    """A copy of a target's checkpoint whose residual stream is rotated.

    So its text is as hard to foretell as before, and the draft is of another target."""
    shutil.copytree(checkpoint, directory)
    file = directory / "model.safetensors"
    out = {name: tensor.double() for name, tensor in load_file(file).items()}
    size = len(out["model.norm.weight"])
    rotation, _ = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(3)).double())

    def reads(norm: str, *names: str) -> None:
        for name in names:
            out[name] = out[name] * out[norm] @ rotation
        out[norm] = torch.ones_like(out[norm])

    out["model.embed_tokens.weight"] = out["model.embed_tokens.weight"] @ rotation
    end = ".input_layernorm.weight"
    for layer in sorted({name.removesuffix(end) for name in out if name.endswith(end)}):
        q, k, v, o = (f"{layer}.self_attn.{one}_proj.weight" for one in "qkvo")
        gate, up, down = (f"{layer}.mlp.{one}_proj.weight" for one in ("gate", "up", "down"))
        reads(f"{layer}.input_layernorm.weight", q, k, v)
        reads(f"{layer}.post_attention_layernorm.weight", gate, up)
        out[o], out[down] = rotation.T @ out[o], rotation.T @ out[down]
    reads("model.norm.weight", "lm_head.weight")
    save_file({name: tensor.float().contiguous() for name, tensor in out.items()}, file, {"format": "pt"})
    return directory
