"""A small trained pair for tests and benches: where its two checkpoints lie, and prompts it never saw."""

from __future__ import annotations

import json
from pathlib import Path

_HERE = Path(__file__).resolve().parent
RECORD = _HERE / "record.json"  # how the pair was trained, and its acceptance on the held-out prompts
KNOWN_ANSWERS = _HERE / "known_answers.jsonl"  # held-out prompts with the target's greedy continuations


def pair_directories() -> dict[str, str]:
    """Absolute paths of the two checkpoints, keys ``target`` and ``draft``.

    Raises FileNotFoundError, naming the file, if a checkpoint is incomplete.
    """
    directories = {name: _HERE / name for name in ("target", "draft")}
    for directory in directories.values():
        for file in ("config.json", "model.safetensors"):
            if not (directory / file).is_file():
                raise FileNotFoundError(
                    f"{directory / file} is absent: expected it in the repository; check it out again"
                )
    return {name: str(directory) for name, directory in directories.items()}


def held_out_prompts() -> list[str]:
    """Prompts of 64 to 600 bytes, shortest first, from files that neither model was trained on (ASCII)."""
    prompts: list[str] = json.loads((_HERE / "prompts.json").read_text(encoding="utf-8"))
    return prompts
