"""Tokens per second in published shapes with the real pair's acceptance: by default, the built-in worker, plain.

python -m bench.shapes --out FILE [--shapes qwen3-4b qwen3-8b qwen3-8b-fp8] [--weights DIR] [--concurrency 1 8 ...]

Each shape is a run of `bench.widths` with recorded acceptance and random weights, one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import report
from dflash_sglang.bench import random_pair
from dflash_sglang.bench.script import script_parser

FP8 = "-fp8"  # of a shape's name: the target in 8 bits
# Wanted of the built-in worker's tokens/s, at 1, 8, 32, 64, 128 requests.
OVER_BUILT_IN = {
    "qwen3-4b": (1.35, 1.15, 1.15, 1.35, 1.5),
    "qwen3-8b": (1.25, 1.15, 1.42, 1.66, 1.77),
    "qwen3-8b-fp8": (1.6, 1.15, 1.4, 1.65, 1.75),
}
CONCURRENCY = (1, 8, 32, 64, 128)
SERVING = "--load-format dummy --cuda-graph-bs-prefill 128 256 512 1024"


def command(shape: str, weights: Path, concurrency: list[int], seconds: float, out: Path) -> list[str]:
    """Of the run of one shape, whose pair is written to `weights` where it is missing."""
    pair = weights / shape.removesuffix(FP8)
    if not (pair / "draft").exists():
        random_pair.write_pair(pair, pair.name, config_only=True)
    wanted = dict(zip(CONCURRENCY, OVER_BUILT_IN[shape], strict=True))
    return [
        *(sys.executable, "-m", "bench.widths", "--target", str(pair / "target"), "--draft", str(pair / "draft")),
        *("--acceptance", "recorded", "--mem-fraction", "0.97", "--seconds", str(seconds), "--fixed"),
        f"--flags={SERVING}{' --quantization fp8' if shape.endswith(FP8) else ''}",
        *("--dflash-flags=--speculative-draft-load-format auto", "--concurrency", *map(str, concurrency)),
        *("--over-built-in", *(f"{at}={wanted[at]}" for at in concurrency if at in wanted)),
        *("--logs", str(out.parent / f"{out.stem}_logs"), "--out", str(out)),
    ]


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shapes", nargs="+", choices=list(OVER_BUILT_IN), default=list(OVER_BUILT_IN))
    parser.add_argument("--weights", type=Path, default=Path("/tmp/random-weights"), help="directory of the pairs")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--seconds", type=float, default=3.5, help="of a load that are measured")
    asked = parser.parse_args()
    figures: dict[str, Any] = {}
    claims: list[dict[str, Any]] = []
    status = 1
    for shape in asked.shapes:
        part = asked.out.with_name(f"{asked.out.stem}_{shape}.json")
        of_part = command(shape, asked.weights, asked.concurrency, asked.seconds, part)
        print(" ".join(of_part), flush=True)
        subprocess.run(of_part, check=False)  # 1 where a claim does not hold
        found = json.loads(part.read_text())
        part.unlink()
        figures[shape] = found["figures"]
        claims += [{**one, "what": f"{shape}, {one['what']}"} for one in found["claims"]]
        # What is there, should the next shape not come.
        status = report.finish("bench.shapes", asked.out, claims, figures=figures)
    return status


if __name__ == "__main__":
    sys.exit(main())
