"""When does the acceptance alarm speak? The trained pair on easy and hard text, and the same pair broken in known ways.

Each server runs on the CPU platform and verifies whole blocks. A case decodes until the alarm has judged `STAYS`
windows of its text; the file says what was accepted and what the alarm said.

    python -m bench.alarm --out bench/results/alarm.json
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from bench.report import claim, finish
from dflash_sglang.demo.launch import ON_CPU, OURS, environment, model_flags, new_server, wait_for
from dflash_sglang.demo.server import Server
from dflash_sglang.observe.alarm import FELL, NONE, STAYS, WINDOW
from dflash_sglang.pair import held_out_prompts, pair_directories

Tensors = dict[str, torch.Tensor]
PAIR = {name: Path(path) for name, path in pair_directories().items()}
PROMPTS, NEW_TOKENS = 32, 96
RUSSIAN = (
    "Утром старая женщина пошла на рынок, купила хлеб, молоко и немного фруктов и долго говорила с пекарем о "
    "погоде. Позже она сидела у окна, смотрела на детей, которые играли во дворе, и думала о прошлых годах. "
)
GERMAN = (
    "Am Morgen ging die alte Frau zum Markt, kaufte Brot, Milch und ein wenig Obst, und sprach lange mit dem Bäcker "
    "über das Wetter. Später saß sie am Fenster, schaute den Kindern zu, die im Hof spielten, und dachte an die "
    "Jahre, in denen sie selbst noch über die Wiesen gelaufen war. Niemand wußte, woher der Fremde kam. "
)


class Text(NamedTuple):
    """What clients send."""

    prompts: list[list[int]]
    temperature: float


def own_text(temperature: float = 0.0) -> Text:
    """What the pair was trained for, from files that it never saw."""
    prompts = [prompt for prompt in held_out_prompts() if len(prompt) > 150][:PROMPTS]
    return Text([list(prompt.encode()) for prompt in prompts], temperature)


def texts() -> dict[str, Text]:
    """Own text and hard text, by name."""
    draw = random.Random(1)

    def parts_of(text: str) -> list[list[int]]:
        whole = list((3 * text).encode())
        return [whole[at : at + 160] for at in (draw.randrange(len(whole) - 160) for _ in range(PROMPTS))]

    noise = [[draw.randrange(256) for _ in range(160)] for _ in range(PROMPTS)]
    files = list("\n".join(held_out_prompts()).encode())
    return {
        "own text": own_text(),
        "own text, temperature 1": own_text(1.0),
        "own text, temperature 1.5": own_text(1.5),
        "random bytes": Text(noise, 0.0),
        "random bytes, temperature 1": Text(noise, 1.0),
        "Russian": Text(parts_of(RUSSIAN), 0.0),
        "German, temperature 1": Text(parts_of(GERMAN), 1.0),
        "contexts of 3000 tokens": Text([files[at : at + 3000] for at in range(0, 16000, 1000)], 0.0),
    }


# ---- Broken pairs ------------------------------------------------------------------------------------------


def changed_copy(
    checkpoint: Path,
    directory: Path,
    tensors: Callable[[Tensors], Tensors] | None = None,
    dflash_config: Mapping[str, Any] | None = None,
) -> Path:
    """A copy of a checkpoint with other tensors, or other fields of its `dflash_config`."""
    shutil.copytree(checkpoint, directory)
    if tensors is not None:
        file = directory / "model.safetensors"
        changed = tensors(load_file(file))
        save_file({name: tensor.contiguous() for name, tensor in changed.items()}, file, {"format": "pt"})
    if dflash_config is not None:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        config["dflash_config"] |= dflash_config
        file.write_text(json.dumps(config))
    return directory


def another_target(tensors: Tensors) -> Tensors:
    """A target that says the same of any text, with other hidden states: its residual stream is rotated.

    So the text is as hard as before, and the draft is of another target."""
    out = {name: tensor.double() for name, tensor in tensors.items()}
    size = len(out["model.norm.weight"])
    rotation, _ = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(3)).double())

    def reads(norm: str, *names: str) -> None:
        for name in names:
            out[name] = out[name] * out[norm] @ rotation
        out[norm] = torch.ones_like(out[norm])

    out["model.embed_tokens.weight"] = out["model.embed_tokens.weight"] @ rotation
    for layer in sorted({name.removesuffix(end) for name in out if name.endswith(end)}):
        q, k, v, o = (f"{layer}.self_attn.{one}_proj.weight" for one in "qkvo")
        gate, up, down = (f"{layer}.mlp.{one}_proj.weight" for one in ("gate", "up", "down"))
        reads(f"{layer}.input_layernorm.weight", q, k, v)
        reads(f"{layer}.post_attention_layernorm.weight", gate, up)
        out[o], out[down] = rotation.T @ out[o], rotation.T @ out[down]
    reads("model.norm.weight", "lm_head.weight")
    return {name: tensor.float() for name, tensor in out.items()}
