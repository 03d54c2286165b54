"""Trains a DFLASH draft for a target, on the target's own answers.

python -m training.fit --target DIR --answers FILE.npz... --out DIR [--held-out FILE.npz...] [--minutes 15]
                       [--config FILE | --mask-token N]

The objective is `training.objective`'s. The draft starts from random weights. Muon moves its matrices, AdamW its
vectors. The rate rises over WARM steps and falls as a cosine over the run. OUT gets config.json, model.safetensors
in bf16 and training.json, the facts; `--held-out` puts accept lengths there too.

Features of the answers lie on the GPU: 2 bytes * layers that are read * hidden size for each token. `--shards`
cuts the answers into so many parts, which are there one after another.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer

from training.accept import LENGTH, check_positive, held_out
from training.checkpoints import save_draft
from training.conversations import Conversations
from training.draft_config import check_config, check_mask_token, default_config, free_token
from training.features import Text, conversations, load_target
from training.modeling import DraftModel
from training.objective import Objective, masks_of

WARM = 200  # steps in which the rate rises
EVERY = 200  # steps between two lines of the log
CHECK = 3000  # steps between two checkpoints, and counts of accept lengths
CHECKED = 32  # conversations of each held-out file that are counted before the end
BEGIN = time.monotonic()


def say(**facts: Any) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f}s]", json.dumps(facts), flush=True)


class Optimizer:
    """Muon for matrices with AdamW's scale of updates, AdamW for vectors."""

    def __init__(self, draft: DraftModel) -> None:
        matrices = [p for p in draft.parameters() if p.ndim > 1]
        vectors = [p for p in draft.parameters() if p.ndim == 1]
        self.parts: list[Any] = [
            torch.optim.Muon(matrices, lr=0.0, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, rate: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)


class Run:
    """One draft's training, from its first step to its checkpoint."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cuda = self.device.type == "cuda"
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.target = load_target(args.target, self.device)
        vocabulary = self.target.config.get_text_config().vocab_size
        answers = conversations(args.answers, "--answers", vocabulary, args.length)
        held = conversations(args.held_out, "--held-out", vocabulary, args.length)
        self.held = {path.stem: of for path, of in zip(args.held_out, held, strict=True)}
        self.config = self._config({f"--answers {p}": of.ids for p, of in zip(args.answers, answers, strict=True)})
        order = np.random.default_rng(args.seed)
        merged = Conversations.joined(answers)
        self.answers = merged.pick(order.permutation(len(merged)))
        self.draft = DraftModel(self.config).to(self.device)
        for module in self.draft.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        objective = Objective(self.draft, self.target)
        self.objective: Any = torch.compile(objective, dynamic=False) if self.cuda else objective
        self.masks: Any = torch.compile(masks_of, dynamic=False) if self.cuda else masks_of
        say(
            parameters=sum(p.numel() for p in self.draft.parameters()),
            conversations=len(self.answers),
            tokens=len(self.answers.ids),
            **self.config["dflash_config"],
        )

    def _config(self, text: dict[str, np.ndarray]) -> dict[str, Any]:
        """The draft's config, from `--config` or by default. text: the ids of the answers, by option and file."""
        args, tokenizer = self.args, AutoTokenizer.from_pretrained(self.args.target)
        if args.config:
            config, option = json_of(args.config), f"--config {args.config}: dflash_config.mask_token_id"
            check_config(config, args.config, self.target)
            token = config["dflash_config"].get("mask_token_id")
        else:
            option = "--mask-token"
            token = free_token(self.target, tokenizer) if args.mask_token is None else args.mask_token
            config = default_config(self.target.config.get_text_config(), token)
        check_mask_token(token, option, self.target, tokenizer, text)
        say(mask_token=token, text=tokenizer.convert_ids_to_tokens(token))
        return config

    def fill(self, turn: int) -> Text:
        """The features of the shard of this turn."""
        pieces = np.array_split(np.arange(len(self.answers)), self.args.shards)
        shard = self.answers.pick(pieces[turn % self.args.shards])
        text = Text(self.target, self.draft.shape.target_layer_ids, shard, self.args.length)
        say(shard=turn % self.args.shards, tokens=int(text.lengths.sum()))
        return text

    def loss(self, text: Text) -> tuple[Tensor, Tensor]:
        """The objective of `--anchors` blocks at random positions of each of `--rows` answers."""
        chosen = torch.multinomial(text.span.float(), self.args.rows, replacement=True)
        drawn = torch.rand(len(chosen), self.args.anchors, device=self.device) * text.span[chosen, None]
        anchors = (text.prompts[chosen, None] + drawn.long()).sort(-1).values
        masks = self.masks(anchors, self.draft.shape, self.args.length, dense=not self.cuda)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda):
            return self.objective(*text.rows(chosen), anchors, masks)

    def held_out(self, most: int | None = None) -> dict[str, Any]:
        """`training.accept`'s facts of `most` conversations of each held-out file, or of all."""
        sets = {name: of.pick(np.arange(len(of))[:most]) for name, of in self.held.items()}
        return held_out(self.draft, self.target, sets, self.args.length)

    def train(self) -> dict[str, Any]:
        """Trains to the end of `--minutes`, or of `--steps`. Returns the facts."""
        args, optimizer = self.args, Optimizer(self.draft)
        text: Text | None = self.fill(0)
        begin, step, turn = time.monotonic(), 0, 0
        losses: list[Tensor] = []
        while True:
            done = step / args.steps if args.steps else (time.monotonic() - begin) / (60 * args.minutes)
            if done >= 1:
                break
            if args.shards > 1 and done >= (turn + 1) / args.turns:
                turn, text = turn + 1, None  # the old features go before the new ones come
                text = self.fill(turn)
            assert text is not None
            loss, length = self.loss(text)
            loss.backward()
            nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
            cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
            optimizer.step(args.rate * min(1, (step + 1) / WARM) * cosine)
            losses = [*losses[-EVERY:], loss.detach()]
            step += 1
            if step % EVERY == 0:
                seen, seconds = torch.stack(losses[-EVERY:]).mean().item(), round(time.monotonic() - begin, 1)
                say(step=step, loss=round(seen, 4), accept=round(length.item(), 3), seconds=seconds)
            if step % CHECK == 0:
                found = self.held_out(CHECKED)
                say(step=step, held_out={name: of["accept_length"] for name, of in found.items()})
                save_draft(self.draft, self.config, args.out)
        return {
            "command": "python -m training.fit " + " ".join(sys.argv[1:]),
            "steps": step,
            "blocks": step * args.rows * args.anchors,
            "seconds": round(time.monotonic() - begin, 1),
            "loss": round(torch.stack(losses[-EVERY:]).mean().item(), 4),
            "held_out": self.held_out(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }


def json_of(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--config {path}: expected a draft's config.json ({error}); correct the path or the file"
        ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="what training.answers wrote")
    parser.add_argument("--held-out", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--config", type=Path, help="of the draft; without it five layers and blocks of 16")
    shape.add_argument("--mask-token", type=int, help="without it a special token of no other use")
    until = parser.add_mutually_exclusive_group()
    until.add_argument("--minutes", type=float, default=15)
    until.add_argument("--steps", type=int, help="in place of --minutes")
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--rows", type=int, default=16, help="conversations of a step")
    parser.add_argument("--anchors", type=int, default=64, help="blocks of each")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a conversation, at most")
    parser.add_argument("--shards", type=int, default=1, help="parts of the answers, one on the GPU at a time")
    parser.add_argument("--turns", type=int, help="of shards, over the whole run; without it each has one")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args(arguments)
    check_positive(args, "minutes", "steps", "rate", "rows", "anchors", "length", "shards", "turns")
    args.turns = args.turns or args.shards
    run = Run(args)
    facts = run.train()
    say(**facts)
    save_draft(run.draft, run.config, args.out)
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
