"""What reading the draft and the head in fp8 costs in accept length, on trained pairs of several widths.

python -m bench.fp8_by_size --corpus corpus.npz --pairs OUT_256 OUT_512 OUT_1024 --out FILE

Takes the directories that `training.train --hidden N` left. Each target continues held-out text greedily. The
draft then walks those continuations as the decoding loop does, with its linear layers and the head in each of both
forms. In fp8 weights are rounded to float8_e4m3fn with a scale per output row and activations with a scale per
token, as `--speculative-draft-model-quantization fp8` and `draft_head: fp8` compute them. All else is float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench import report
from bench.draft_fp8 import GAIN as DRAFT_GAIN
from bench.draft_fp8 import quantise
from bench.draft_head import GAIN as HEAD_GAIN
from dflash_sglang.bench.script import script_parser
from training.data import Corpus
from training.draft import walk_accept_length
from training.modeling import DraftModel
from training.reference import ReferenceDraft
from training.target import BulkGenerator, features_and_argmax, greedy

PROMPT = 128  # bytes
TOKENS = 256  # that follow
BLOCK = 16
ROWS = 64  # walked at once
# Of a step's time in Qwen3-8B's shapes on an H200: what each form saves.
GAINS = {"draft_fp8": DRAFT_GAIN, "head_fp8": HEAD_GAIN, "both_fp8": DRAFT_GAIN + HEAD_GAIN}


def load(directory: Path, device: torch.device) -> tuple[Any, DraftModel]:
    """(target, draft), both in float32."""
    target: Any = AutoModelForCausalLM.from_pretrained(directory / "target", dtype=torch.float32)
    return target.to(device).eval(), ReferenceDraft.load(directory / "draft").model.to(device)


@torch.no_grad()
def measure(target: Any, draft: DraftModel, prompts: Tensor) -> dict[str, Any]:
    """Accept lengths of the four forms. prompts: [N, PROMPT] int64."""
    length = PROMPT + TOKENS + BLOCK
    ids = BulkGenerator(target, len(prompts), length, torch.float32).run(prompts, greedy)
    features, _ = features_and_argmax(target, ids, draft.shape.target_layer_ids, chunk=ROWS)

    def accept_length() -> float:
        walks = [
            walk_accept_length(draft, target, rows.float(), of, PROMPT, TOKENS, (BLOCK,))[BLOCK]
            for rows, of in zip(features.split(ROWS), ids.split(ROWS), strict=True)
        ]
        # Rows have as many tokens, so steps are tokens over length: their mean is a harmonic one.
        return len(walks) / sum(1 / walk for walk in walks)

    head = target.lm_head
    as_is, kind = head.weight.clone(), head.__class__
    found = {"as_is": accept_length()}
    quantise(torch.nn.ModuleList([head]))
    found["head_fp8"] = accept_length()
    quantise(draft)
    found["both_fp8"] = accept_length()
    head.__class__ = kind
    head.weight.copy_(as_is)
    found["draft_fp8"] = accept_length()
    return {
        "hidden": draft.shape.hidden_size,
        "accept_length": {form: round(value, 4) for form, value in found.items()},
        "over_as_is": {form: round(found[form] / found["as_is"], 4) for form in GAINS},
        "prompts": len(prompts),
        "tokens": TOKENS,
    }


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, nargs="+", required=True)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held_out = torch.from_numpy(Corpus.load(args.corpus).held_out.astype("int64"))
    at = torch.randint(0, len(held_out) - PROMPT, (args.prompts, 1), generator=torch.Generator().manual_seed(0))
    prompts = held_out[at + torch.arange(PROMPT)].to(device)
    figures, claims, status = [], [], 1
    for directory in args.pairs:
        target, draft = load(directory, device)
        of = measure(target, draft, prompts)
        figures.append({**of, "training": json.loads((directory / "training.json").read_text())})
        print(json.dumps(of), flush=True)
        for form, gain in GAINS.items():
            what = f"hidden {of['hidden']}: accept length of {form} over that of neither"
            claims.append(report.at_least(what, of["over_as_is"][form], 1 - gain))
        # What is there, should the next pair not come.
        status = report.finish("bench.fp8_by_size", args.out, claims, figures=figures, gains_of_step_time=GAINS)
    return status


if __name__ == "__main__":
    sys.exit(main())
