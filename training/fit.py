"""Trains a DFLASH draft for a target, on the target's own answers.

python -m training.fit --target DIR --answers FILE.npz... --held-out FILE.npz --out DIR
                       [--config FILE] [--minutes 15] [--mask-token N] [--fractions 0 0.1 ...]

Objective: blocks at random positions of answers, each an anchor token and mask tokens, over the target's features
of the positions before it; cross entropy against the target's argmax, as long as the text before it in the block is
what the target would have chosen. A position's weight falls with its distance from the anchor by exp(-(k - 1) / 7),
and, with `--reached`, by how probable the draft's own chain is to get there.

Features are made once for as much text as fits into `--gigabytes`, and again for other text in each of `--shards`
turns. The draft starts from the target's last layers where the shapes agree (`--random` leaves that out).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AutoModelForCausalLM

from training.conversations import Conversations
from training.modeling import DraftModel, DraftShape

DECAY = 7.0
LENGTH = 768  # tokens of a row; longer conversations are cut
BEGIN = time.monotonic()


def say(**facts: Any) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f}s]", json.dumps(facts), flush=True)


def default_config(target: Any, mask_token: int, layers: int = 5, block: int = 16) -> dict[str, Any]:
    """A draft's config.json for a target's config: its heads, its width, features after five layers spread evenly."""
    last = target.num_hidden_layers
    taps = sorted({round(1 + i * (last - 4) / 4) for i in range(5)})
    rope = {**(getattr(target, "rope_parameters", None) or {})}
    heads = target.num_attention_heads
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // heads,
        "num_hidden_layers": layers,
        "num_target_layers": last,
        "block_size": block,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": float(rope.get("rope_theta") or getattr(target, "rope_theta", 10000.0)),
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * layers,
        "dflash_config": {"mask_token_id": mask_token, "target_layer_ids": taps},
    }


def start_from_target(draft: DraftModel, target: Any) -> None:
    """Copies the target's last layers into the draft, tensor by tensor where names and shapes agree.

    The features of the last tap alone go through `fc`.
    """
    own = draft.state_dict()
    layers = draft.shape.num_layers
    theirs = target.model.layers[-layers:].state_dict()
    with torch.no_grad():
        for name, tensor in theirs.items():
            mine = own.get(f"layers.{name}")
            if mine is not None and mine.shape == tensor.shape:
                mine.copy_(tensor)
        draft.norm.weight.copy_(target.model.norm.weight)
        draft.fc.weight.zero_()
        hidden = draft.shape.hidden_size
        draft.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        draft.fc.weight.add_(torch.randn_like(draft.fc.weight) * 0.01)


class Text:
    """Conversations on the device, with the target's features and argmax of every position of a part of them."""

    def __init__(self, target: Any, taps: Sequence[int], tokens: int, device: torch.device) -> None:
        self.target, self.taps, self.device = target, tuple(taps), device
        width = len(taps) * target.config.hidden_size
        self.features = torch.zeros(tokens + LENGTH, width, dtype=torch.bfloat16, device=device)
        self.best = torch.zeros(tokens + LENGTH, dtype=torch.int32, device=device)
        self.ids = torch.zeros(tokens + LENGTH, dtype=torch.int32, device=device)
        self.room = tokens
        self.seen: dict[int, Tensor] = {}
        for tap in self.taps:
            target.model.layers[tap].register_forward_hook(partial(self._see, tap))

    def _see(self, tap: int, layer: nn.Module, inputs: Any, output: Any) -> None:
        self.seen[tap] = output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def fill(self, held: Conversations, rows: int = 64) -> None:
        """Takes the conversations in their order, as many as there is room for, cut at LENGTH tokens."""
        lengths = np.minimum(held.lengths, LENGTH)
        count = int(np.searchsorted(np.cumsum(lengths), self.room, "right"))
        lengths, order = lengths[:count], np.argsort(lengths[:count], kind="stable")
        starts, at = held.starts, 0
        self.starts = torch.zeros(count, dtype=torch.long)
        for first in range(0, count, rows):
            some = order[first : first + rows]
            longest = int(lengths[some].max())
            padded = np.zeros((len(some), longest), np.int64)
            for row, i in enumerate(some):
                padded[row, : lengths[i]] = held.ids[starts[i] : starts[i] + lengths[i]]
            ids = torch.from_numpy(padded).to(self.device)
            best = self.target(ids, use_cache=False).logits.argmax(-1)
            features = torch.cat([self.seen[i] for i in self.taps], -1)
            for row, i in enumerate(some):
                n = int(lengths[i])
                self.features[at : at + n] = features[row, :n]
                self.best[at : at + n], self.ids[at : at + n] = best[row, :n], ids[row, :n]
                self.starts[i] = at
                at += n
        self.starts = self.starts.to(self.device)
        self.lengths = torch.from_numpy(lengths.astype(np.int64)).to(self.device)
        self.prompts = torch.from_numpy(held.prompts[:count].astype(np.int64)).to(self.device)
        self.span = (self.lengths - self.prompts - 1).clamp(min=0)  # positions that a block may begin at

    def rows(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(features [R, LENGTH, width], ids, best [R, LENGTH], lengths [R]); what is past a row's length is noise."""
        at = self.starts[chosen, None] + torch.arange(LENGTH, device=self.device)
        return self.features[at], self.ids[at].long(), self.best[at].long(), self.lengths[chosen]


def masks_of(anchors: Tensor, shape: DraftShape) -> list[Tensor | BlockMask]:
    """What each layer's queries see: the context before their anchor and their own block, within a layer's window
    and, where it is causal, up to themselves.

    anchors: [R, A] -> per layer for [R, A * block] queries over LENGTH context rows and the queries' own. Without a
    GPU a bias, since FlexAttention has no gradients there.
    """
    rows, count = anchors.shape
    size = shape.block_size
    queries, keys = count * size, LENGTH + count * size
    made: dict[tuple[bool, int | None], Tensor | BlockMask] = {}
    for kind, causal in zip(shape.layer_types, shape.causal, strict=True):
        window = shape.window if kind == "sliding_attention" else None
        if (causal, window) in made:
            continue

        def visible(
            b: Tensor, h: Tensor, q: Tensor, kv: Tensor, causal: bool = causal, window: int | None = window
        ) -> Tensor:
            anchor, inside, own = anchors[b, q // size], q % size, kv - LENGTH
            seen = torch.where(kv < LENGTH, kv < anchor, own // size == q // size)
            gap = anchor + inside - torch.where(kv < LENGTH, kv, anchor + own % size)
            if causal:
                seen = seen & (gap >= 0)
            return seen if window is None else seen & (gap.abs() < window)

        if anchors.device.type == "cuda":
            made[causal, window] = create_block_mask(visible, rows, None, queries, keys, anchors.device)
        else:
            b, q, kv = (torch.arange(n) for n in (rows, queries, keys))
            seen = visible(b[:, None, None, None], b, q[:, None], kv)
            made[causal, window] = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    windows = [shape.window if kind == "sliding_attention" else None for kind in shape.layer_types]
    return [made[key] for key in zip(shape.causal, windows, strict=True)]


class Objective(nn.Module):
    """Loss and accept lengths of blocks; a module, so that one compilation serves all of a run."""

    def __init__(self, draft: DraftModel, target: Any) -> None:
        super().__init__()
        self.draft = draft
        self.embed, self.head = (
            target.get_input_embeddings().weight.detach(),
            target.get_output_embeddings().weight.detach(),
        )

    def forward(
        self,
        features: Tensor,
        ids: Tensor,
        best: Tensor,
        lengths: Tensor,
        anchors: Tensor,
        masks: list[Tensor | BlockMask],
        reached: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> (loss, agreed [R, A, block - 1] of 0 or 1, valid of the same shape).

        features: [R, T, width]; ids, best: [R, T]; lengths: [R]; anchors: [R, A]; reached: (), the share of the
        weight that follows the draft's own chain.
        """
        shape = self.draft.shape
        size = shape.block_size
        at = anchors[..., None] + torch.arange(size, device=anchors.device)
        block = torch.full(at.shape, shape.mask_token_id, device=ids.device)
        block[..., 0] = ids.gather(1, anchors)
        positions = at.flatten(1)
        context = self.draft.context_kv(features, torch.arange(features.shape[1], device=ids.device))
        embeds = F.embedding(block.flatten(1), self.embed).to(features.dtype)
        hidden = self.draft(embeds, positions, context, masks)
        logits = F.linear(hidden.unflatten(1, at.shape[1:])[:, :, 1:].to(self.head.dtype), self.head)
        inside = at[..., 1:] < lengths[:, None, None]
        at = at[..., 1:].clamp(max=ids.shape[1] - 1)
        labels = best.gather(1, (at - 1).flatten(1)).view(at.shape)
        text = ids.gather(1, at.flatten(1)).view(at.shape)
        same = ((text == labels) & inside).float().cumprod(-1)
        valid = torch.cat((torch.ones_like(same[..., :1]), same[..., :-1]), -1) * inside
        losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="none").view(
            labels.shape
        )
        chain = torch.exp(-losses.detach() * valid).cumprod(-1)  # the draft's chain is right so far
        before = torch.cat((torch.ones_like(chain[..., :1]), chain[..., :-1]), -1)
        fall = torch.exp(-torch.arange(size - 1, device=ids.device) / DECAY)
        weights = valid * fall * (1 - reached + reached * before)
        hits = (logits.argmax(-1) == labels) * valid
        return (losses * weights).sum() / weights.sum(), hits.detach(), valid


@torch.no_grad()
def accept_lengths(measure: Callable[..., Any], text: Text, size: int, rows: int, count: int) -> list[list[int]]:
    """Tokens that each step commits in each conversation of `text`, greedy, in one block of `size` a step.

    The first token of an answer is the prefill's; the last step may be cut by the answer's end.
    """
    pieces, zero = [], torch.zeros((), device=text.device)
    for index in range(len(text.lengths)):
        first, last = int(text.prompts[index]), int(text.lengths[index]) - 1
        pieces += [(index, at, min(at + count, last)) for at in range(first, last, count)]
    agreed: dict[int, list[int]] = {}
    for start in range(0, len(pieces), rows):
        part = pieces[start : start + rows]
        part += [part[-1]] * (rows - len(part))
        chosen = torch.tensor([p[0] for p in part], device=text.device)
        anchors = torch.tensor([[min(p[1] + i, p[2] - 1) for i in range(count)] for p in part], device=text.device)
        _, hits, _ = measure(*text.rows(chosen), anchors, zero)
        runs = hits[..., : size - 1].cumprod(-1).sum(-1).int().tolist()
        for (index, at, stop), run in list(zip(part, runs, strict=True))[: len(pieces) - start]:
            agreed.setdefault(index, []).extend(run[: stop - at])
    steps = []
    for run in agreed.values():
        at, own = 0, []
        while at < len(run):
            own.append(min(run[at] + 1, len(run) - at))
            at += run[at] + 1
        steps.append(own)
    return steps


class Muon:
    """AdamW for vectors, and for matrices too where `muon` is false; else Muon with AdamW's scale of updates."""

    def __init__(self, draft: DraftModel, muon: bool) -> None:
        matrices = [p for p in draft.parameters() if p.ndim > 1]
        vectors = [p for p in draft.parameters() if p.ndim == 1]
        settings: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "fused": torch.cuda.is_available()}
        if muon:
            self.parts: list[Any] = [
                torch.optim.Muon(
                    matrices, lr=0.0, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
                ),
                torch.optim.AdamW(vectors, weight_decay=0.0, **settings),
            ]
        else:
            groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
            self.parts = [torch.optim.AdamW(groups, **settings)]

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
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        target: Any = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).to(self.device)
        self.target = target.eval().requires_grad_(False)
        self.config = default_config(target.config, args.mask_token)
        if args.config:
            self.config = json.loads(args.config.read_text())
        self.draft = DraftModel(self.config).to(self.device)
        answers = Conversations.load(args.answers[0])
        for path in args.answers[1:]:
            answers = answers + Conversations.load(path)
        order = np.random.default_rng(args.seed).permutation(len(answers))
        self.answers = answers.pick(order[: args.most] if args.most else order)
        self.held = {path.stem: Conversations.load(path) for path in args.held_out}
        taps = self.draft.shape.target_layer_ids
        shard = -(-int(np.minimum(self.answers.lengths, LENGTH).sum()) // args.shards)
        with torch.no_grad():
            self.text = Text(self.target, taps, shard, self.device)
            self.held_text = {}
            for name, held in self.held.items():
                text = Text(self.target, taps, int(np.minimum(held.lengths, LENGTH).sum()), self.device)
                text.fill(held)
                self.held_text[name] = text
        objective = Objective(self.draft, self.target)
        compiled = self.device.type == "cuda"
        self.objective = torch.compile(objective, dynamic=False) if compiled else objective
        self.masks = torch.compile(masks_of, dynamic=False) if compiled else masks_of
        say(
            parameters=sum(p.numel() for p in self.draft.parameters()),
            conversations=len(self.answers),
            tokens=len(self.answers.ids),
            taps=taps,
        )

    def fill(self, turn: int) -> None:
        """Makes the features of the shard of this turn."""
        pieces = np.array_split(np.arange(len(self.answers)), self.args.shards)
        self.text.fill(self.answers.pick(pieces[turn % self.args.shards]))
        say(shard=turn % self.args.shards, tokens=int(self.text.lengths.sum()))

    def start(self, random: bool) -> None:
        torch.manual_seed(self.args.seed)
        for module in self.draft.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
            elif hasattr(module, "eps"):
                nn.init.ones_(module.weight)
        if not random:
            start_from_target(self.draft, self.target)

    def measured(
        self, features: Tensor, ids: Tensor, best: Tensor, lengths: Tensor, anchors: Tensor, reached: Tensor
    ) -> Any:
        masks = self.masks(anchors, self.draft.shape)
        wide = self.device.type != "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not wide):
            return self.objective(
                features.float() if wide else features, ids, best, lengths, anchors, masks, reached
            )

    def anchors(self, chosen: Tensor) -> Tensor:
        """[R, A], in order: positions of the answers' tokens but the last."""
        span, first = self.text.span[chosen, None], self.text.prompts[chosen, None]
        drawn = torch.rand(len(chosen), self.args.anchors, device=self.device) * span
        return (first + drawn.long()).sort(-1).values

    def held_out(self) -> dict[str, list[float]]:
        """Accept lengths of each held-out set at a block of 16 and of 8: tokens after the first, by steps."""
        found = {}
        for name, text in self.held_text.items():
            of = {}
            for size in (self.draft.shape.block_size, 8):
                steps = accept_lengths(self.measured, text, size, self.args.rows, self.args.anchors)
                of[size] = round(sum(map(sum, steps)) / sum(map(len, steps)), 3)
            found[name] = list(of.values())
        return found

    def train(
        self, minutes: float, most: int, rate: float, muon: bool, reached: float, random: bool
    ) -> dict[str, Any]:
        """Trains anew. minutes: of the clock; most: steps at most, by which the rate falls if given. -> the facts."""
        args = self.args
        self.start(random)
        optimizer = Muon(self.draft, muon)
        share = torch.tensor(reached, device=self.device)
        begin, step, turn, seen = time.monotonic(), 0, 0, 0.0
        losses: list[Tensor] = []
        while True:
            done = step / most if most else (time.monotonic() - begin) / (60 * minutes)
            if done >= 1:
                break
            if args.shards > 1 and done >= (turn + 1) / args.turns:
                turn += 1
                self.fill(turn)
            chosen = torch.multinomial(self.text.span.float(), args.rows, replacement=True)
            anchors = self.anchors(chosen)
            now = rate * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
            loss, hits, _ = self.measured(*self.text.rows(chosen), anchors, share)
            loss.backward()
            nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
            optimizer.step(now)
            losses.append(loss.detach())
            step += 1
            if step % args.every == 0:
                seen = torch.stack(losses[-args.every :]).mean().item()
                length = 1 + hits.cumprod(-1).sum(-1).float().mean().item()
                say(
                    step=step,
                    loss=round(seen, 4),
                    accept=round(length, 3),
                    seconds=round(time.monotonic() - begin, 1),
                )
            if step % args.check == 0:
                say(step=step, held_out=self.held_out())
                if not most:
                    self.save()
        facts = {
            "steps": step,
            "blocks": step * args.rows * args.anchors,
            "seconds": round(time.monotonic() - begin, 1),
            "final_train_loss": round(torch.stack(losses[-100:]).mean().item(), 4),
            "held_out": self.held_out(),
            "rate": rate,
            "muon": muon,
            "reached": reached,
            "from_target": not random,
        }
        say(**facts)
        return facts

    def save(self) -> None:
        out = self.args.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")
        state = {k: v.detach().bfloat16().cpu().contiguous() for k, v in self.draft.state_dict().items()}
        save_file(state, out / "model.safetensors", {"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", type=Path, help="of the draft; without it one of five layers and blocks of 16")
    parser.add_argument("--mask-token", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--rows", type=int, default=32, help="conversations of a step")
    parser.add_argument("--anchors", type=int, default=64, help="blocks of each")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--turns", type=int, default=6, help="of shards, over the whole run")
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--check", type=int, default=3000)
    parser.add_argument("--most", type=int, help="conversations of --answers to use")
    parser.add_argument("--steps", type=int, default=0, help="a run of so many steps in place of --minutes")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--adamw", action="store_true")
    parser.add_argument("--reached", type=float, default=0.0)
    parser.add_argument("--random", action="store_true")
    parser.add_argument(
        "--sweep", type=json.loads, help="a list of settings of `train`, each run for --steps first"
    )
    args = parser.parse_args(arguments)
    run = Run(args)
    run.fill(0)
    for setting in args.sweep or ():
        print("SWEEP", json.dumps({"setting": setting, **run.train(0, args.steps, **setting)}), flush=True)
    if args.sweep:
        return
    facts = run.train(args.minutes, args.steps, args.rate, not args.adamw, args.reached, args.random)
    run.save()
    facts["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
