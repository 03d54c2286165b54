"""What a target of `transformers` says about text: the residual stream after chosen layers, and its argmax."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from training.conversations import Conversations

AT_ONCE = 2**14  # tokens of one forward: their logits in bf16 take 5 GB of a vocabulary of 150 thousand


def load_target(name: str, device: torch.device) -> Any:
    """A frozen target, in bf16 on a GPU and in float32 on a CPU.

    Raises SystemExit for what is no causal LM, or has no decoder layers at `model.layers`.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cuda.enable_cudnn_sdp(False)  # some versions of cuDNN refuse the shapes of blocks' masks
    try:
        target: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise SystemExit(
            f"--target {name}: expected a causal LM that transformers reads ({why}); give its directory"
        ) from error
    decoder_layers(target, name)
    return target.to(device).eval().requires_grad_(False)


def decoder_layers(target: nn.Module, name: str = "") -> Any:
    """The target's layers. Raises SystemExit where its class keeps them elsewhere than Llama and Qwen3 do."""
    try:
        return target.get_submodule("model.layers")
    except AttributeError as error:
        raise SystemExit(
            f"--target {name}: {type(target).__name__} has no `model.layers`, expected its decoder layers there, "
            "as Llama and Qwen3 have them; take a target of such a class"
        ) from error


@torch.no_grad()
def read(target: Any, taps: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids: [N, T] -> features [N, T, taps * hidden] in the target's dtype, argmax of every position [N, T]."""
    seen: dict[int, Tensor] = {}

    def see(tap: int, layer: nn.Module, inputs: Any, output: Any) -> None:
        seen[tap] = output[0] if isinstance(output, tuple) else output

    layers = decoder_layers(target)
    handles = [layers[tap].register_forward_hook(partial(see, tap)) for tap in taps]
    try:
        best = target(ids, use_cache=False).logits.argmax(-1)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([seen[tap] for tap in taps], -1), best


def conversations(
    paths: Sequence[Path], option: str, vocabulary: int, length: int, first: int | None = None
) -> list[Conversations]:
    """The conversations of each file, of each the `first`, or all, without those whose answer is cut away.

    Raises SystemExit for a file without answers, or of another vocabulary.
    """
    found = []
    for path in paths:
        held = Conversations.load(path, option)
        if held.ids.max(initial=0) >= vocabulary:
            raise SystemExit(
                f"{option} {path}: token {held.ids.max()}: expected tokens below {vocabulary}, the target's "
                "vocabulary; make the answers with this target"
            )
        of_answer = (np.minimum(held.lengths, length) - held.prompts)[:first]
        some = np.flatnonzero(of_answer >= 2)
        if not len(some):
            raise SystemExit(
                f"{option} {path}: none of {len(of_answer)} conversations has two tokens of answer: expected some "
                f"within --length {length}; make answers to more or shorter prompts, or raise --length"
            )
        if left := len(of_answer) - len(some):
            print(f"{path}: {left} conversations have no two tokens of answer within {length}", file=sys.stderr)
        found.append(held.pick(some))
    return found


class Text:
    """Conversations on a device, end to end, with the target's features and argmax of every position.

    features: [N + length, taps * hidden]; ids, best: [N + length], int32; starts, lengths, prompts: [C];
    span: [C], at how many positions of the answer a block may begin. Conversations are cut at `length` tokens.
    """

    def __init__(self, target: Any, taps: Sequence[int], held: Conversations, length: int) -> None:
        self.length, self.device, dtype = length, target.device, target.dtype
        lengths = np.minimum(held.lengths, length)
        total, width = int(lengths.sum()) + length, len(taps) * target.config.get_text_config().hidden_size
        self.features = torch.zeros(total, width, dtype=dtype, device=self.device)
        self.best = torch.zeros(total, dtype=torch.int32, device=self.device)
        self.ids = torch.zeros(total, dtype=torch.int32, device=self.device)
        starts = torch.zeros(len(held), dtype=torch.long)
        begins, order, at, first = held.starts, np.argsort(lengths, kind="stable"), 0, 0
        while first < len(order):
            rows = max(1, AT_ONCE // max(1, int(lengths[order[first : first + 64]].max())))
            some = order[first : first + min(64, rows)]
            padded = np.zeros((len(some), int(lengths[some].max())), np.int64)
            for row, i in enumerate(some):
                padded[row, : lengths[i]] = held.ids[begins[i] : begins[i] + lengths[i]]
            ids = torch.from_numpy(padded).to(self.device)
            features, best = read(target, taps, ids)
            for row, i in enumerate(some):
                here = slice(at, at + int(lengths[i]))
                for of, its in ((self.features, features), (self.best, best), (self.ids, ids)):
                    of[here] = its[row, : lengths[i]]
                starts[i], at = at, here.stop
            first += len(some)
        self.starts = starts.to(self.device)
        self.lengths = torch.from_numpy(lengths.astype(np.int64)).to(self.device)
        self.prompts = torch.from_numpy(held.prompts.astype(np.int64)).to(self.device)
        self.span = (self.lengths - self.prompts - 1).clamp(min=0)

    def rows(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(features [R, length, width], ids, best [R, length], lengths [R]); past a row's length is noise."""
        at = self.starts[chosen, None] + torch.arange(self.length, device=self.device)
        return self.features[at], self.ids[at].long(), self.best[at].long(), self.lengths[chosen]
