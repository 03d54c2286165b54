"""The training text: CPython's standard library source as bytes, with whole files held out for prompts.

``python -m training.data --out corpus.npz`` writes the corpus of the running Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BOS, EOS, PAD, MASK = 256, 257, 258, 259
"""Ids 0..255 are the bytes themselves."""

SEED = 7
HELD_OUT_FILES = 30
HELD_OUT_BYTES = (6_000, 60_000)


@dataclass(frozen=True)
class Corpus:
    """tokens: uint16, every file as BOS, its bytes, EOS; facts: what the record says about the text."""

    train: np.ndarray
    held_out: np.ndarray
    prompts: list[str]
    facts: dict[str, object]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            train=self.train,
            held_out=self.held_out,
            text=json.dumps({"prompts": self.prompts, "facts": self.facts}),
        )

    @staticmethod
    def load(path: Path) -> Corpus:
        with np.load(path) as data:
            text = json.loads(str(data["text"]))
            return Corpus(data["train"], data["held_out"], text["prompts"], text["facts"])


def build(root: Path) -> Corpus:
    """Reads every UTF-8 ``*.py`` below ``root``, site-packages excluded.

    Held out are files of the library proper (no tests, no code-page tables), ASCII, 6 to 60 kB, that carry no
    notice of their own, so that the prompts are under the Python Software Foundation licence alone.
    """
    texts: dict[str, bytes] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "__pycache__" in name:
            continue
        data = path.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if data:
            texts[name] = data
    candidates = [
        name
        for name, data in texts.items()
        if HELD_OUT_BYTES[0] <= len(data) <= HELD_OUT_BYTES[1]
        and "test" not in name
        and not name.startswith("encodings/")
        and data.isascii()
        and re.search(rb"copyright|licen[cs]e", data, re.IGNORECASE) is None
    ]
    held = sorted(random.Random(SEED).sample(candidates, HELD_OUT_FILES))
    train = [name for name in texts if name not in held]
    facts: dict[str, object] = {
        "text": f"CPython {platform.python_version()} standard library, *.py, tests included",
        "licence": "Python Software Foundation License Version 2",
        "train_files": len(train),
        "train_bytes": sum(len(texts[n]) for n in train),
        "held_out_files": held,
        "held_out_bytes": sum(len(texts[n]) for n in held),
    }
    return Corpus(
        train=_stream([texts[n] for n in train]),
        held_out=_stream([texts[n] for n in held]),
        prompts=_prompts([texts[n].decode() for n in held], count=80, shortest=64, longest=600),
        facts=facts,
    )


def _stream(files: list[bytes]) -> np.ndarray:
    parts = []
    for data in files:
        parts += [[BOS], np.frombuffer(data, np.uint8), [EOS]]
    return np.concatenate([np.asarray(p, np.uint16) for p in parts])


def _prompts(texts: list[str], count: int, shortest: int, longest: int) -> list[str]:
    """Pieces that begin at a line's start, their lengths spread evenly, the files taken in turn."""
    chance = random.Random(SEED)
    prompts = []
    for index in range(count):
        length = shortest + (longest - shortest) * index // (count - 1)
        text = texts[index % len(texts)]
        starts = [m.end() for m in re.finditer("\n", text) if m.end() + length <= len(text)]
        start = chance.choice(starts)
        prompts.append(text[start : start + length])
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    corpus = build(args.stdlib)
    corpus.save(args.out)
    print(json.dumps(corpus.facts, indent=1))


if __name__ == "__main__":
    main()
