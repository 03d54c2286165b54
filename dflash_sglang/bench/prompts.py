"""What the load asks: texts, as they are or as the end of a context of a given length, or random token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_sglang.bench.settings import Settings


def texts_of(path: Path) -> tuple[str, ...]:
    """The lines of a file that hold more than white space. Raises ValueError without any, OSError unread."""
    texts = tuple(line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not texts:
        raise ValueError(f"{path} has no line of text")
    return texts


def contexts(settings: Settings, length: int | None, count: int) -> list[str]:
    """`count` prompts, of texts evenly apart.

    With a length, each is cut or filled from the left, with other texts, to about that many tokens (it stays text,
    which the server divides into tokens itself). Without, a text that comes again is the same prompt: its prefix
    may be in the radix cache, on every server alike.
    """
    texts = settings.prompts
    chosen = [i * len(texts) // count if count < len(texts) else i % len(texts) for i in range(count)]
    if length is None:
        return [texts[i] for i in chosen]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    ids = [tokenizer.encode(text + "\n", add_special_tokens=False) for text in texts]
    return [tokenizer.decode(_context(ids, last, length, seed)) for seed, last in enumerate(chosen)]


def _context(texts: Sequence[Sequence[int]], last: int, length: int, seed: int) -> list[int]:
    """The `length` last ids of a row of texts, drawn from `seed` but for the last one."""
    rng = random.Random(seed)
    out = list(texts[last])
    while len(out) < length:
        out = [*rng.choice(texts), *out]
    return out[-length:]


def dataset_flags(settings: Settings, length: int | None, count: int, output: int, directory: Path) -> list[str]:
    """The dataset of a load of `count` requests, as arguments of `sglang.benchmark.serving`."""
    if not settings.prompts:
        return [
            "--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1.0",
            "--random-input-len", str(length), "--random-output-len", str(output),
        ]  # fmt: skip
    path = directory / f"prompts_{length or 'as_they_are'}_{count}.jsonl"
    turns = ([{"content": text}, {"content": "-"}] for text in contexts(settings, length, count))
    path.write_text("".join(json.dumps({"conversations": turn}) + "\n" for turn in turns), encoding="utf-8")
    chat = ["--apply-chat-template"] if settings.chat else []
    return ["--dataset-name", "custom", "--dataset-path", str(path), "--sharegpt-output-len", str(output), *chat]


def requests(settings: Settings, length: int | None, count: int) -> list[dict[str, Any]]:
    """The same kind of prompts as fields of /generate."""
    if settings.prompts:
        return [{"text": text} for text in contexts(settings, length, count)]
    rng = random.Random(0)
    ids = range(settings.vocabulary)
    return [{"input_ids": rng.choices(ids, k=length or 1)} for _ in range(count)]
