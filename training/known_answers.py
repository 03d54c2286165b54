"""Writes held-out prompts with known continuations beside the pair: `training/pair/known_answers.jsonl`.

``python -m training.known_answers`` decodes every second held-out prompt with the target alone, greedily, in
float32. It leaves out prompts with a near-tie along the continuation, so that a server in bfloat16 gives the
others too. Each line is one JSON object with the keys of GSM8K: ``question`` is the prompt, ``answer`` the
continuation.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from training.evaluate import load_pair
from training.pair import KNOWN_ANSWERS, held_out_prompts
from training.reference import plain_generate

NEW_TOKENS = 64  # or fewer, where EOS comes
EVERY = 2
LEAST_GAP = 0.1  # between the two best logits at every token of a continuation


def continuation(target: Any, tokenizer: Any, prompt: str) -> tuple[str, float]:
    """The greedy continuation of a prompt and the smallest gap between the two best logits along it."""
    ids = tokenizer.encode(prompt)
    new = plain_generate(target, ids, NEW_TOKENS)
    with torch.no_grad():
        logits = target(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    return tokenizer.decode(new, skip_special_tokens=True), (best - second).min().item()


def main() -> None:
    target, _, tokenizer = load_pair()
    with KNOWN_ANSWERS.open("w", encoding="utf-8") as file:
        for prompt in held_out_prompts()[::EVERY]:
            answer, gap = continuation(target, tokenizer, prompt)
            if gap >= LEAST_GAP:
                file.write(json.dumps({"question": prompt, "answer": answer}) + "\n")


if __name__ == "__main__":
    main()
