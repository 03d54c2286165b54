"""Accept length of the trained pair on this machine against the reference loop's, and its speed.

python -m bench.pair --out FILE

Serves the pair in bfloat16 with this package's worker and without speculation, sends the held-out prompts one
by one, greedy, as many new tokens as the record has, and compares with `training/pair/record.json`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo import launch
from dflash_sglang.demo.launch import OURS, PLAIN, model_flags, new_server, wait_for
from dflash_sglang.demo.server import Server
from training import pair

TOLERANCE = 0.02
LEAST_SPEEDUP = 1.5  # over plain decoding, one request at a time


def prompts_of_pair() -> list[list[int]]:
    """Token ids of the held-out prompts: the pair's tokens are bytes."""
    return [list(text.encode()) for text in pair.held_out_prompts()]


def pair_server(
    kind: str, log: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Server:
    """A server of the trained pair of a kind, not started yet."""
    own = [*model_flags(kind, **pair.pair_directories()), "--skip-tokenizer-init", "--max-total-tokens", "60000"]
    own += ["--mem-fraction-static", "0.5", "--cuda-graph-max-bs-decode", "8"]
    return new_server([*own, *flags], environment={**launch.environment(kind), **(environment or {})}, log=log)


def decode(server: Server, prompts: Sequence[Sequence[int]], new_tokens: int, **sampling: Any) -> dict[str, Any]:
    """Prompts one by one on a ready server: its outputs, verify steps and tokens per second."""
    sampling = dict(max_new_tokens=new_tokens, ignore_eos=True, **sampling)
    server.generate(input_ids=prompts[0], sampling_params=sampling)
    server.post("/flush_cache?timeout=60")
    start = time.perf_counter()
    answers = [server.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]
    elapsed = time.perf_counter() - start
    outputs = [answer["output_ids"] for answer in answers]
    steps = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    after_the_first = sum(len(output) - 1 for output in outputs)
    return {
        "outputs": outputs,
        "verify_steps": steps,
        "new_tokens_after_the_first_per_step": after_the_first / steps if steps else 1.0,
        "tokens_per_second": sum(map(len, outputs)) / elapsed,
    }


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    record = json.loads((Path(pair.__file__).parent / "record.json").read_text())["evaluation"]
    prompts = prompts_of_pair()
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind in (OURS, PLAIN):
            with pair_server(kind, Path(scratch) / kind) as server:
                wait_for(kind, server)
                results[kind] = decode(server, prompts, record["new_tokens"], temperature=0)
    ours, plain = (results[kind].pop("outputs") for kind in (OURS, PLAIN))
    reference = record["block_16"]["new_tokens_after_the_first_per_step"]
    ratio = results[OURS]["new_tokens_after_the_first_per_step"] / reference
    what = "accept length over the reference loop's, block 16, bfloat16, CUDA graphs"
    speedup = round(results[OURS]["tokens_per_second"] / results[PLAIN]["tokens_per_second"], 4)
    return report.finish(
        "bench.pair",
        arguments.out,
        [
            report.claim(what, round(ratio, 4), f"within {TOLERANCE:.0%} of 1", abs(ratio - 1) <= TOLERANCE),
            report.at_least("tokens/s over plain decoding's, one request at a time", speedup, LEAST_SPEEDUP),
        ],
        figures=results,
        reference_new_tokens_after_the_first_per_step=reference,
        outputs_equal_to_plain_decoding=sum(a == b for a, b in zip(ours, plain, strict=True)),
        prompts=len(prompts),
        new_tokens=record["new_tokens"],
    )


if __name__ == "__main__":
    sys.exit(main())
