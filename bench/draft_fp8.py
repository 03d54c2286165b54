"""What fp8 layers of the draft cost in accept length, against what they gain in time.

python -m bench.draft_fp8 --out FILE

The trained pair in the plain-PyTorch reference loop, float32, on the held-out prompts, greedy: with the draft as
it is, and with each of its linear layers as `--speculative-draft-model-quantization fp8` computes it, weights
rounded to float8_e4m3fn by output row and activations by token. `GAIN` bounds what may be lost where fp8 is the
default.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench import report
from dflash_sglang.bench.script import script_parser
from dflash_sglang.pair import held_out_prompts
from training.evaluate import load_pair
from training.reference import generate

NEW_TOKENS = 256
GAIN = 0.023  # of a step's time, in Qwen3-8B's shapes on an H200 at concurrency 1; 0.025 at 32
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Fp8Linear(nn.Linear):
    """A linear layer of which `rounded` has been called."""

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rounded(rows), self.weight, self.bias)


def rounded(rows: Tensor) -> Tensor:
    """rows [..., n] in float8_e4m3fn with a scale each, back in their own dtype."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return (rows / scale).to(torch.float8_e4m3fn).to(rows.dtype) * scale


@torch.no_grad()
def quantise(model: nn.Module) -> int:
    """Makes every linear layer of a model an `Fp8Linear`; returns how many there are."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for layer in layers:
        layer.__class__ = Fp8Linear
        layer.weight.copy_(rounded(layer.weight))
    return len(layers)


def measure(target: Any, draft: Any, prompts: list[list[int]]) -> dict[str, Any]:
    results = [generate(target, draft, prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    lengths = [length for result in results for length in result.accept_lengths]
    return {
        "accept_length": sum(lengths) / len(lengths),
        "verify_steps": len(lengths),
        "outputs": [result.ids for result in results],
    }


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    target, draft, tokenizer = load_pair()
    prompts = [tokenizer.encode(text) for text in held_out_prompts()]
    as_is = measure(target, draft, prompts)
    layers = quantise(draft.model)
    fp8 = measure(target, draft, prompts)
    lengths, outputs = ((fp8[key], as_is[key]) for key in ("accept_length", "outputs"))
    claims = report.accept_length_kept("layers in fp8", lengths, outputs, GAIN)
    del as_is["outputs"], fp8["outputs"]
    return report.finish(
        "bench.draft_fp8",
        arguments.out,
        claims,
        as_is=as_is,
        fp8=fp8,
        linear_layers=layers,
        prompts=len(prompts),
        new_tokens=NEW_TOKENS,
    )


if __name__ == "__main__":
    sys.exit(main())
