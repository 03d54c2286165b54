"""Trains the small pair's target on text, and lets it generate what `training.fit` trains the draft on.

``python -m training.train --corpus corpus.npz --out DIR`` writes DIR/target, DIR/answers.npz, DIR/held.npz,
DIR/draft.json (the draft's config), DIR/prompts.json and DIR/training.json. Training runs for a time budget with a
cosine learning rate over it; the number of steps depends on the machine and is recorded. ``--smoke`` runs every
stage for a few steps on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from training.checkpoints import HIDDEN, draft_config, round_to_bf16, save_target, target_config
from training.conversations import Conversations
from training.data import Corpus
from training.target import BulkGenerator, greedy, greedy_with_breaks, language_loss

PROMPT_LENGTHS = (96, 288, 512, 24, 416, 160, 640, 48, 224, 352)
FULL = {
    "length": 1024,
    "max_steps": 10**6,
    "target_rows": 64,
    "rows": 4096,
    "rounds": 10,
    "check_rows": 64,
    "check_tokens": 128,
}
SMOKE = {
    "length": 160,
    "max_steps": 3,
    "target_rows": 1,
    "rows": 4,
    "rounds": 1,
    "check_rows": 2,
    "check_tokens": 8,
}
BEGIN = time.monotonic()


def say(**facts: Any) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f}s]", json.dumps(facts), flush=True)


def budgeted(seconds: float, max_steps: int, optimizer: torch.optim.Optimizer, peak: float) -> Iterator[int]:
    """Yields step numbers until the budget ends and sets the learning rate: warm-up, then cosine over time.

    The clock starts after the first step, which compiles.
    """
    start = time.monotonic()
    for step in range(max_steps):
        if step == 1:
            start = time.monotonic()
        done = max((time.monotonic() - start) / seconds if step else 0.0, step / max_steps)
        if done >= 1:
            return
        rate = peak * min(1.0, (step + 1) / 200) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        yield step


def adamw(model: nn.Module, decay: float, fused: bool) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=fused)


def conversations(made: Tensor, prompt: int) -> Conversations:
    """made: [N, T], of which `prompt` tokens are the prompt's."""
    rows = np.full(len(made), made.shape[1], np.int32)
    return Conversations(made.flatten().cpu().numpy().astype(np.int32), rows, np.full_like(rows, prompt))


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.cuda = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.corpus = Corpus.load(args.corpus)
        self.random = torch.Generator(device=self.device).manual_seed(args.seed)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)  # some versions of cuDNN refuse the shapes of these models
        self.facts: dict[str, Any] = {
            "command": "python -m training.train " + " ".join(sys.argv[1:]),
            "seed": args.seed,
            "hidden": args.hidden,
            "device": torch.cuda.get_device_name() if self.cuda else "cpu",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "corpus": self.corpus.facts,
        }

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if self.args.compile else function

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)

    def tokens(self, stream: np.ndarray) -> Tensor:
        return torch.from_numpy(stream.astype(np.int16)).to(self.device)

    def windows(self, stream: Tensor, rows: int, length: int) -> Tensor:
        """Random windows of the stream, [rows, length], int64."""
        at = torch.randint(0, len(stream) - length, (rows, 1), generator=self.random, device=self.device)
        return stream[at + torch.arange(length, device=self.device)].long()

    def train_target(self) -> Qwen3ForCausalLM:
        args = self.args
        train, held = self.tokens(self.corpus.train), self.tokens(self.corpus.held_out)
        model = Qwen3ForCausalLM(target_config(args.hidden)).to(self.device)
        optimizer = adamw(model, 0.1, self.cuda)
        loss_of = self.compiled(lambda ids: language_loss(model, ids))
        step, loss = 0, torch.zeros(())
        for step in budgeted(args.target_seconds, args.max_steps, optimizer, args.target_rate):
            with self.autocast():
                loss = loss_of(self.windows(train, args.target_rows, args.length + 1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 500 == 0:
                say(stage="target", step=step, loss=round(loss.item(), 4))
        round_to_bf16(model)
        model.requires_grad_(False).eval()
        with torch.no_grad(), self.autocast():
            picked = [self.windows(held, args.target_rows, args.length + 1) for _ in range(4)]
            held_loss = sum(language_loss(model, ids).item() for ids in picked) / 4
        self.facts["target"] = {
            "steps": step + 1,
            "tokens": (step + 1) * args.target_rows * args.length,
            "final_train_loss_nats_per_byte": round(loss.item(), 4),
            "held_out_loss_nats_per_byte": round(held_loss, 4),
            "optimizer": f"AdamW, peak rate {args.target_rate}, weight decay 0.1, "
            f"rows {args.target_rows} x {args.length}",
        }
        say(**self.facts["target"])
        save_target(model, args.out / "target")
        return model

    def generate(self, model: Qwen3ForCausalLM) -> None:
        """Writes answers to training prompts, and greedy ones to held-out prompts."""
        args = self.args
        train, held = self.tokens(self.corpus.train), self.tokens(self.corpus.held_out)
        start = time.monotonic()
        with self.autocast():
            check = BulkGenerator(model, args.check_rows, 144 + args.check_tokens, self.dtype).run(
                self.windows(held, args.check_rows, 128), greedy
            )
            generator = BulkGenerator(model, args.rows, args.length, self.dtype)
            parts = []
            for length in PROMPT_LENGTHS[: args.rounds]:
                pick = greedy_with_breaks(args.rows, self.device, 0.8)
                made = generator.run(self.windows(train, args.rows, length), pick)
                parts.append(conversations(made, length))
                say(stage="generate", prompt=length, rows=args.rows)
                if time.monotonic() - start > args.generate_seconds:
                    break
        for row in check[:3].tolist():
            print(bytes(t for t in row[:256] if t < 256).decode(errors="replace"), flush=True)
            print("-----", flush=True)
        self.facts["generated"] = {
            "sequences": args.rows * len(parts),
            "length": args.length,
            "prompt_lengths": list(PROMPT_LENGTHS[: len(parts)]),
            "rule": "greedy for 176 tokens, sampled at temperature 0.8 for 48, repeated",
        }
        Conversations.joined(parts).save(args.out / "answers.npz")
        conversations(check, 128).save(args.out / "held.npz")

    def run(self) -> None:
        args = self.args
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "prompts.json").write_text(json.dumps(self.corpus.prompts, indent=1) + "\n")
        say(device=self.facts["device"], train_tokens=len(self.corpus.train))
        model = self.train_target()
        self.write_facts()
        self.generate(model)
        (args.out / "draft.json").write_text(json.dumps(draft_config(args.hidden), indent=1) + "\n")
        self.write_facts()

    def write_facts(self) -> None:
        self.facts["seconds"] = round(time.monotonic() - BEGIN, 1)
        (self.args.out / "training.json").write_text(json.dumps(self.facts, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="width of both models")
    parser.add_argument("--rows", type=int, help="sequences that are generated at once")
    parser.add_argument("--rounds", type=int, help="how often so many are, each with prompts of another length")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--target-seconds", type=float, default=130)
    parser.add_argument("--generate-seconds", type=float, default=70)
    parser.add_argument("--target-rate", type=float, default=2e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    for name, value in (SMOKE if args.smoke else FULL).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    Trainer(args).run()


if __name__ == "__main__":
    main()
