"""The record of the packaged pair, for measurements that force acceptance to be like it.

python -m bench.record FILE.npz... [--out bench/records/pair.npz] [--texts 20] [--tokens 256]

The files are those of `training.accept --records`, one for each data set. Of each it takes the first texts that
are long enough, and their first tokens: after every one, the draft's likeliest tokens at each place of a block,
and which of them the target's answer goes on with (`dflash_sglang.bench.forced.record`). Servers of this package
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
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.widths import PAIR_RECORD
from dflash_sglang.bench.forced.record import AcceptanceRecord
from dflash_sglang.bench.script import script_parser
from dflash_sglang.kernels.block.share_rows import share_rows

WIDTHS = (4, 6, 8, 12, 16)


def beginnings(whole: AcceptanceRecord, texts: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(logprobs, ranks) of the first `tokens` starts of the first texts that have so many. Raises ValueError."""
    of_text = (np.flatnonzero(whole.prompts == text) for text in range(int(whole.prompts.max()) + 1))
    long = [starts[:tokens] for starts in of_text if len(starts) >= tokens]
    if len(long) < texts:
        raise ValueError(f"--texts {texts}: {len(long)} have {tokens} tokens; lower --texts or --tokens")
    chosen = np.concatenate(long[:texts])
    return whole.logprobs[chosen], whole.ranks[chosen]


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
    parser.add_argument("sets", type=Path, nargs="+", metavar="FILE.npz")
    parser.add_argument("--out", type=Path, default=PAIR_RECORD)
    parser.add_argument("--texts", type=int, default=20, help="of each file")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    asked = parser.parse_args()
    parts = [beginnings(AcceptanceRecord.load(path), asked.texts, asked.tokens) for path in asked.sets]
    logprobs, ranks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    prompts = np.arange(len(parts) * asked.texts, dtype=np.uint8).repeat(asked.tokens)
    record = AcceptanceRecord(logprobs, ranks, prompts)
    asked.out.parent.mkdir(exist_ok=True)
    np.savez_compressed(asked.out, **record._asdict())
    facts = {
        "sets": [path.stem for path in asked.sets],
        "prompts": len(parts) * asked.texts,
        "new_tokens": asked.tokens,
        **statistics(record),
    }
    asked.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
