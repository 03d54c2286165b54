"""What an fp8 copy of the head costs in accept length, against what it gains in time.

SGLANG_PLATFORM=dflash_cpu python -m bench.draft_head --out FILE --flags "--device cpu --dtype float32"

Serves the pair with the head as it is and with an fp8 copy for drafting, one after the other, and sends the
held-out prompts one by one, greedy: outputs are the same, verify steps are not. `GAIN` bounds what may be lost
where the copy is the default.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.pair import decode, pair_server, prompts_of_pair
from dflash_sglang.bench.script import script_parser
from dflash_sglang.demo.launch import OURS, wait_for, worker_line
from dflash_sglang.settings.plugin_config import CONFIG_ENV

NEW_TOKENS = 256
GAIN = 0.023  # of a step's time: half of the head's GEMM, on an H200 in Qwen3-8B's shapes, at 1 and at 32 requests
FORMS = ("as_is", "fp8")
LENGTH = "new_tokens_after_the_first_per_step"


def measure(form: str, flags: Sequence[str], prompts: Sequence[Sequence[int]], log: Path) -> dict[str, Any]:
    """Figures of a server, and its `outputs`. Raises RuntimeError where it drafts by another form of head."""
    environment = {CONFIG_ENV: json.dumps({"draft_head": form, "width": "block"})}
    with pair_server(OURS, log, flags, environment) as server:
        wait_for(OURS, server)
        if f"head: {form} (" not in (line := worker_line(server.log_text())):
            raise RuntimeError(f"draft_head={form!r}: expected head: {form} where the server says: {line}")
        return decode(server, prompts, NEW_TOKENS, temperature=0)


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of every server, one string")
    arguments = parser.parse_args()
    prompts = prompts_of_pair()
    with tempfile.TemporaryDirectory() as scratch:
        figures = {form: measure(form, arguments.flags, prompts, Path(scratch) / form) for form in FORMS}
    as_is, fp8 = (figures[form].pop("outputs") for form in FORMS)
    lengths = (figures["fp8"][LENGTH], figures["as_is"][LENGTH])
    claims = report.accept_length_kept("the fp8 copy", lengths, (fp8, as_is), GAIN)
    return report.finish(
        "bench.draft_head",
        arguments.out,
        claims,
        figures=figures,
        prompts=len(prompts),
        new_tokens=NEW_TOKENS,
        gain_of_step_time=GAIN,
    )


if __name__ == "__main__":
    sys.exit(main())
