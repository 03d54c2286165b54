"""What each linear layer of a draft reads while it drafts: for static activation scales and GPTQ's rounding."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TEXTS = (
    *(
        "argparse",
        "ast",
        "bdb",
        "calendar",
        "codecs",
        "dataclasses",
        "difflib",
        "fractions",
        "functools",
        "inspect",
    ),
    *("json/decoder", "logging/handlers", "mailbox", "pathlib", "random", "shutil", "statistics", "tarfile"),
    *("textwrap", "unittest/case"),
)
"""Modules of the standard library, none of them held out."""

TEXT_BYTES = 600
NEW_TOKENS = 160


@dataclass
class Inputs:
    """Of one linear layer: ``largest`` absolute activation; ``moments`` [in, in], the sum of x x^T."""

    largest: float
    moments: Tensor


def read_inputs(draft: Path) -> dict[str, Inputs]:
    """By module name, while the reference loop decodes source text with the package's target and the draft in
    the directory `draft`: context rows and block rows alike."""
    from transformers import AutoModelForCausalLM

    from training.pair import pair_directories
    from training.reference import ReferenceDraft, generate

    target = AutoModelForCausalLM.from_pretrained(pair_directories()["target"], dtype=torch.float32).eval()
    reference = ReferenceDraft.load(draft)
    read: dict[str, Inputs] = {}

    def watch(name: str) -> Any:
        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].flatten(0, -2)
            seen = read.setdefault(name, Inputs(0.0, rows.new_zeros(rows.shape[1], rows.shape[1])))
            seen.largest = max(seen.largest, float(rows.abs().max()))
            seen.moments += rows.T @ rows

        return note

    linear = {name: m for name, m in reference.model.named_modules() if isinstance(m, nn.Linear)}
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linear.items()]
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in TEXTS:
        text = (library / f"{name}.py").read_bytes()
        middle = len(text) // 2
        generate(target, reference, list(text[middle : middle + TEXT_BYTES]), NEW_TOKENS, ignore_eos=True)
    for handle in handles:
        handle.remove()
    return read
