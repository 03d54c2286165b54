"""Counts the accept length of a target and a draft on held-out conversations, greedy, one block a step.

python -m training.accept --target DIR --draft DIR --held-out FILE.npz... [--first N] [--records DIR] [--out FILE]

It prints JSON, by name of a file: `accept_length`, the tokens after an answer's first by the steps that they take,
with blocks of the trained size and of fewer tokens; `acceptance_by_position`, the share of the steps that accept
the proposal at position 1, 2, ... Arithmetic is float32 on a CPU, bf16 on a GPU.

`--records`: for each file, DIR/NAME.npz says of every token of an answer, as a block's anchor, which proposals
come true and how likely they were. `dflash_sglang.bench.forced.record.AcceptanceRecord` reads it, and
`tokens_of_texts` there its `tokens`, the anchors. Past an answer's end no proposal comes true.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from training.conversations import Conversations
from training.features import conversations, decoder_layers, load_target, read
from training.modeling import DraftModel
from training.objective import block_logits, labels_of, masks_of
from training.reference import ReferenceDraft

ANCHORS = 64  # blocks of one draft forward
RANKS = 8  # tokens of each place in a record
WIDTHS = (4, 8, 12, 16)
LENGTH = 768  # tokens of a conversation


class Proposals(NamedTuple):
    """What the draft proposes after each token of the answers but the last, A of them.

    logprobs: [A, block - 1, K] float16, of the K likeliest tokens at each place, likeliest first; ranks:
    [A, block - 1] uint8, which of them the target commits there, K for none; prompts: [A], the conversation's
    number; tokens: [A] int32, the anchors.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    prompts: np.ndarray
    tokens: np.ndarray


@torch.no_grad()
def proposed(draft: DraftModel, target: Any, ids: Tensor, prompt: int, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """(logprobs [A, block - 1, ranks], ranks [A, block - 1]) of one conversation, as `Proposals` has them.

    ids: [T], of which `prompt` are the prompt's -> A = T - 1 - prompt.
    """
    wide = ids.device.type != "cuda"
    features, best = read(target, draft.shape.target_layer_ids, ids[None])
    length = torch.tensor([len(ids)], device=ids.device)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    parts = []
    for anchors in torch.arange(prompt, len(ids) - 1, device=ids.device)[None].split(ANCHORS, dim=1):
        masks = masks_of(anchors, draft.shape, len(ids))
        labels, valid = labels_of(ids[None], best, length, anchors, draft.shape.block_size)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=not wide):
            [logits] = block_logits(draft, embed, head, features, ids[None], anchors, masks)
        logprobs, tokens = logits.float().log_softmax(-1).topk(ranks, dim=-1)
        hits = (tokens == labels[0, ..., None]) & (valid[0, ..., None] > 0)
        parts.append((logprobs, torch.where(hits.any(-1), hits.int().argmax(-1), ranks)))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def proposals(
    draft: DraftModel, target: Any, held: Conversations, length: int = LENGTH, ranks: int = 1
) -> Proposals:
    """Of all conversations, each cut at `length` tokens, of which two or more are of the answer."""
    parts: list[Proposals] = []
    for start, stop, prompt in zip(held.starts, np.minimum(held.lengths, length), held.prompts, strict=True):
        ids = torch.from_numpy(held.ids[start : start + stop].astype(np.int64)).to(target.device)
        logprobs, rank = proposed(draft, target, ids, int(prompt), ranks)
        parts.append(
            Proposals(
                logprobs.cpu().numpy().astype(np.float16),
                rank.cpu().numpy().astype(np.uint8),
                np.full(len(rank), len(parts), np.uint8 if len(held) <= 256 else np.uint16),
                ids[prompt:-1].cpu().numpy().astype(np.int32),
            )
        )
    return Proposals(*map(np.concatenate, zip(*parts, strict=True)))


def steps_of(accepted: Sequence[int], width: int) -> list[int]:
    """Tokens that each step commits of one answer: accepted proposals and the bonus token, the last step uncut.

    accepted: of a whole block at each anchor; width: tokens verified a step. The first token is the prefill's.
    """
    steps, at = list[int](), 0
    while at < len(accepted):
        steps.append(min(int(accepted[at]), width - 1) + 1)
        at += steps[-1]
    return steps


def acceptance_by_position(accept_lengths: Sequence[int], block_size: int) -> list[float]:
    """Share of the verify steps that accepted the proposal at position k of the block, k = 1 .. block-1."""
    return [round(sum(n > k for n in accept_lengths) / len(accept_lengths), 4) for k in range(1, block_size)]


def facts_of(made: Proposals) -> dict[str, Any]:
    """The accept lengths of `made`, by width, and its acceptance by position."""
    size = made.ranks.shape[1] + 1
    accepted = (made.ranks == 0).cumprod(axis=1, dtype=np.int64).sum(axis=1)
    answers = np.split(accepted, np.flatnonzero(np.diff(made.prompts.astype(int))) + 1)
    widths = sorted({size, *(width for width in WIDTHS if width < size)})
    steps = {width: [n for answer in answers for n in steps_of(answer, width)] for width in widths}
    return {
        "conversations": len(answers),
        "tokens": len(accepted),
        "steps": len(steps[size]),
        "accept_length": {width: round(len(accepted) / len(of), 4) for width, of in steps.items()},
        "acceptance_by_position": acceptance_by_position(steps[size], size),
    }


def held_out(
    draft: DraftModel, target: Any, sets: Mapping[str, Conversations], length: int = LENGTH
) -> dict[str, Any]:
    """`facts_of` each set's proposals."""
    return {name: facts_of(proposals(draft, target, held, length)) for name, held in sets.items()}


def load_draft(directory: Path, target: Any) -> DraftModel:
    """A draft of z-lab's format, in float32. Raises SystemExit for another, or one of another target."""
    expected = f"--draft {directory}: expected config.json and *.safetensors of a DFlash draft in z-lab's format"
    try:
        draft = ReferenceDraft.load(directory).model
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        why = " ".join(str(error).split())[:300]
        raise SystemExit(f"{expected} ({type(error).__name__}: {why}); give a directory with both") from error
    hidden, layers = target.config.get_text_config().hidden_size, len(decoder_layers(target))
    shape = draft.shape
    if shape.hidden_size != hidden or not all(0 <= tap < layers for tap in shape.target_layer_ids):
        raise SystemExit(
            f"--draft {directory}: hidden_size {shape.hidden_size}, target_layer_ids {[*shape.target_layer_ids]}: "
            f"expected {hidden} and layers below {layers}, the target's; give the draft of this target"
        )
    return draft.to(target.device).requires_grad_(False)


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises SystemExit for an option that is given and not more than 0."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise SystemExit(f"--{name} {value}: expected more than 0; raise it")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, nargs="+", required=True, help="what training.answers wrote")
    parser.add_argument("--first", type=int, help="conversations of each file; without it all")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a conversation that count, at most")
    parser.add_argument("--records", type=Path, help="a directory for records of every proposal")
    parser.add_argument("--out", type=Path, help="a file for the JSON too")
    args = parser.parse_args(arguments)
    check_positive(args, "first", "length")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(args.target, device)
    draft = load_draft(args.draft, target)
    vocabulary = target.config.get_text_config().vocab_size
    sets = conversations(args.held_out, "--held-out", vocabulary, args.length, args.first)
    found = {}
    for path, held in zip(args.held_out, sets, strict=True):
        begin = time.monotonic()
        made = proposals(draft, target, held, args.length, RANKS if args.records else 1)
        found[path.stem] = {**facts_of(made), "seconds": round(time.monotonic() - begin, 1)}
        print(path.stem, found[path.stem]["accept_length"], file=sys.stderr, flush=True)
        if args.records:
            args.records.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(args.records / f"{path.stem}.npz", **made._asdict())
    facts = {
        "target": args.target,
        "draft": str(args.draft),
        "block_size": draft.shape.block_size,
        "arithmetic": "bf16 on a GPU" if device.type == "cuda" else "float32 on a CPU",
        "length": args.length,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sets": found,
    }
    text = json.dumps(facts, indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
