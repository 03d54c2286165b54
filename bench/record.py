"""Records what the trained pair proposes and accepts, for measurements that force acceptance to be like it.

python -m bench.record [--out bench/records/pair.npz] [--prompts 40] [--new-tokens 128]

The target continues held-out prompts greedily, in float32. After each of its tokens the draft proposes a block,
with context of the target's own text, as in serving. Recorded are the draft's likeliest tokens at every place of
the block, and which of them the text goes on with (`dflash_sglang.bench.forced.record`). Servers of this package
and of `bench.coins` read it. A JSON file of the same name has:

by_prompt        accept length where every prompt is decoded alone, from its first token to its last: mean of all
                 steps, and the standard deviation of the prompts' means
in_a_circle      accept length of a request that reads all texts one after another, without end, as forced
                 acceptance does
rows             tokens a request and step where so many rows of each are verified on average, all prompts as one
                 batch: the first of everyone, or those that the draft finds the likeliest (`share_rows`)
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from bench.widths import PAIR_RECORD
from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.bench.script import script_parser
from dflash_sglang.kernels.block.share_rows import share_rows
from training.evaluate import load_pair
from training.features import read
from training.objective import block_logits, masks_of
from training.pair import held_out_prompts
from training.reference import ReferenceDraft
from training.shapes import likeliest

RANKS = 8
WIDTHS = (4, 6, 8, 12, 16)
ANCHORS = 32  # blocks of one draft forward


@torch.no_grad()
def continued(target: Any, prompt: Sequence[int], tokens: int) -> Tensor:
    """[1, prompt + tokens]: greedy decoding of a prompt."""
    ids, cache = torch.tensor([list(prompt)]), None
    step = ids
    for _ in range(tokens):
        out = target(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, step = out.past_key_values, out.logits[:, -1].argmax(dim=-1, keepdim=True)
        ids = torch.cat((ids, step), dim=1)
    return ids


@torch.no_grad()
def marginal_logits(target: Any, draft: ReferenceDraft, ids: Tensor, prompt: int, tokens: int) -> Tensor:
    """[1, tokens, block - 1, vocab] of blocks that start at each of the first tokens after the prompt."""
    features, _ = read(target, draft.shape.target_layer_ids, ids)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    logits = []
    for anchors in torch.arange(prompt, prompt + tokens)[None].split(ANCHORS, dim=1):
        masks = masks_of(anchors, draft.shape, ids.shape[1])
        logits.append(block_logits(draft.model, embed, head, features, ids, anchors, masks))
    return torch.cat(logits, dim=1)


def proposed(
    target: Any, draft: ReferenceDraft, prompt: Sequence[int], new_tokens: int, ranks: int = RANKS
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [new_tokens, block - 1, ranks] and ranks [new_tokens, block - 1] of one prompt, as
    `AcceptanceRecord` has them."""
    block = draft.shape.block_size
    ids = continued(target, prompt, new_tokens + block)
    [logits] = marginal_logits(target, draft, ids, len(prompt), new_tokens)
    best = likeliest(logits, ranks)
    hits = torch.from_numpy(best.tokens) == ids[0, len(prompt) + 1 :].unfold(0, block - 1, 1)[:new_tokens, :, None]
    rank = torch.where(hits.any(dim=-1), hits.int().argmax(dim=-1), ranks)
    return best.logp.astype(np.float16), rank.to(torch.uint8).numpy()


def steps_of_prompt(accepted: np.ndarray, width: int) -> list[int]:
    """Tokens that each step commits of one text, decoded from its first token to its last; the last step uncut."""
    steps, start = list[int](), 0
    while start < len(accepted) - 1:
        steps.append(min(int(accepted[start]), width - 1) + 1)
        start += steps[-1]
    return steps


def in_a_circle(accepted: np.ndarray, width: int) -> float:
    """Accept length of a request that reads all texts one after another: ten rounds, after an uncounted one."""
    start, steps, total = 0, 0, len(accepted)
    while start < 11 * total:
        steps += start >= total
        start += min(int(accepted[start % total]), width - 1) + 1
    return 10 * total / steps


Share = Callable[[Tensor, int, Tensor, Tensor], None]


def as_one_batch(accepted: np.ndarray, logprobs: np.ndarray, rows: int, share: Share | None) -> float:
    """Tokens of a request and step, all prompts decoded as one batch. accepted [prompts, starts], logprobs
    [prompts, starts, proposals]; rows: of a request on average. share: as `share_rows`; None: the first rows."""
    prompts, starts = accepted.shape
    at, tokens, steps = np.zeros(prompts, int), 0, 0
    while len(live := np.flatnonzero(at < starts - 1)):
        lens = torch.full((len(live),), rows, dtype=torch.int32)
        if share is not None:
            of_step = torch.from_numpy(logprobs[live, at[live]].astype(np.float32))
            share(of_step, rows * len(live), lens, torch.empty(len(live) + 1, dtype=torch.int32))
        committed = np.minimum(accepted[live, at[live]], lens.numpy() - 1) + 1
        at[live] += committed
        tokens, steps = tokens + int(committed.sum()), steps + len(live)
    return tokens / steps


def statistics(record: AcceptanceRecord) -> dict[str, Any]:
    prompts = int(record.prompts.max()) + 1
    texts = record.accepted.reshape(prompts, -1)
    likeliest = record.logprobs[..., 0].reshape(*texts.shape, -1)
    found: dict[str, Any] = {"by_prompt": {}, "in_a_circle": {}, "rows": {}}
    for width in WIDTHS:
        by_prompt = [steps_of_prompt(text, width) for text in texts]
        means = [float(np.mean(steps)) for steps in by_prompt]
        every = [step for steps in by_prompt for step in steps]
        found["by_prompt"][width] = {
            "steps": len(every),
            "accept_length": round(float(np.mean(every)), 4),
            "deviation_between_prompts": round(float(np.std(means)), 4),
        }
        found["in_a_circle"][width] = round(in_a_circle(record.accepted, width), 4)
        found["rows"][width] = {
            name: round(as_one_batch(texts, likeliest, width, share), 4)
            for name, share in (("first", None), ("ragged", share_rows))
        }
    return found


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", type=Path, default=PAIR_RECORD)
    parser.add_argument("--prompts", type=int, default=40, help="the shortest ones")
    parser.add_argument("--new-tokens", type=int, default=128, help="of each prompt")
    arguments = parser.parse_args()
    target, draft, tokenizer = load_pair()
    texts = [
        proposed(target, draft, tokenizer.encode(text), arguments.new_tokens)
        for text in held_out_prompts()[: arguments.prompts]
    ]
    logprobs, ranks = (np.concatenate(arrays) for arrays in zip(*texts, strict=True))
    prompts = np.arange(len(texts), dtype=np.uint8).repeat(arguments.new_tokens)
    record = AcceptanceRecord(logprobs, ranks, prompts)
    arguments.out.parent.mkdir(exist_ok=True)
    np.savez_compressed(arguments.out, **record._asdict())
    facts = {
        "command": " ".join(["python -m bench.record", *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "prompts": len(texts),
        "new_tokens": arguments.new_tokens,
        **statistics(record),
    }
    arguments.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
