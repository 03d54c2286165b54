"""Measures the pair with the reference loop and writes its record.

``python -m training.evaluate --training DIR/training.json --draft-training DIR/draft/training.json`` decodes the
held-out prompts in float32 with the shipped (bf16) weights, checks that the output equals plain greedy decoding,
and writes ``record.json`` beside the weights: training facts, accept lengths, acceptance by position, sizes.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.accept import acceptance_by_position
from training.pair import held_out_prompts, pair_directories
from training.reference import ReferenceDraft, generate, plain_generate

NEW_TOKENS = 128


def load_pair() -> tuple[Any, ReferenceDraft, Any]:
    """(target in float32, draft in float32, tokenizer)."""
    directories = pair_directories()
    target = AutoModelForCausalLM.from_pretrained(directories["target"], dtype=torch.float32)
    return (
        target.eval(),
        ReferenceDraft.load(directories["draft"]),
        AutoTokenizer.from_pretrained(directories["target"]),
    )


def measure(block_sizes: Sequence[int]) -> dict[str, Any]:
    target, draft, tokenizer = load_pair()
    prompts = [tokenizer.encode(text) for text in held_out_prompts()]
    plain = [plain_generate(target, ids, NEW_TOKENS, ignore_eos=True) for ids in prompts]
    facts: dict[str, Any] = {
        "definition": "accept length = tokens committed per verify step, bonus token included, the token of "
        "prefill excluded, the last step uncut; mean over all steps of all prompts",
        "arithmetic": "float32 on the shipped bf16 weights, plain PyTorch, batch 1, CPU, greedy, EOS ignored",
        "prompts": len(prompts),
        "prompt_bytes": [min(map(len, prompts)), max(map(len, prompts))],
        "new_tokens": NEW_TOKENS,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    for size in block_sizes:
        results = [generate(target, draft, ids, NEW_TOKENS, size, ignore_eos=True) for ids in prompts]
        steps = [n for result in results for n in result.accept_lengths]
        facts[f"block_{size}"] = {
            "accept_length": round(sum(steps) / len(steps), 4),
            "verify_steps": len(steps),
            "new_tokens_after_the_first_per_step": round(len(prompts) * (NEW_TOKENS - 1) / len(steps), 4),
            "outputs_equal_to_plain_greedy": sum(r.ids == p for r, p in zip(results, plain, strict=True)),
            "acceptance_at_position_1_on": acceptance_by_position(steps, size),
            "accept_length_per_prompt": [round(r.mean_accept_length, 3) for r in results],
        }
        print(size, facts[f"block_{size}"], flush=True)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--training", type=Path, required=True, help="facts of training.train")
    parser.add_argument("--draft-training", type=Path, required=True, help="facts of training.fit")
    args = parser.parse_args()
    directories = {name: Path(path) for name, path in pair_directories().items()}
    record = {
        "training": {
            **json.loads(args.training.read_text()),
            "draft": json.loads(args.draft_training.read_text()),
        },
        "evaluation": measure((16, 8)),
        "bytes": {
            name: sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            for name, path in directories.items()
        },
    }
    (directories["draft"].parent / "record.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
