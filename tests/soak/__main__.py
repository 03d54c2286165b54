"""A soak of a running server: seeded mixed requests, many at a time, some of them aborted.

python -m tests.soak --url URL [--plain-url URL] [--requests 2000] [--concurrency 24] [--json FILE]

Every answer is checked against its request, the pools must be as full afterwards as before, and greedy outputs
are compared with those of a server without speculation. Where the two part, plain's logprobs of its two best
tokens at that position tell a tie (close ones, as bfloat16 rounds them) from a defect. Plain decoding counts
penalties up to the last token only with --disable-overlap-schedule.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench import report
from dflash_sglang.bench.script import script_parser
from tests.soak.checks import compare
from tests.soak.run import claims, plain_answers, soak


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--url", required=True, help="the server under test")
    parser.add_argument("--plain-url", help="a server of the same target without speculation")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tie", type=float, default=0.13, help="largest gap of two logprobs that counts as a tie")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    soaked = soak(arguments.url, arguments.requests, arguments.concurrency, arguments.seed)
    figures, claimed = soaked.figures(), claims(soaked)
    more: dict[str, Any] = {"figures": figures, "problems": soaked.problems()}
    if arguments.plain_url:
        greedy = soaked.greedy
        comparison = compare(greedy, plain_answers(arguments.plain_url, greedy, arguments.concurrency))
        defects = comparison.defects(arguments.tie)
        figures["plain"] = {
            "compared": comparison.compared,
            "equal": comparison.compared - len(comparison.divergences),
            "equal_share": round(1 - len(comparison.divergences) / max(1, comparison.compared), 5),
            "gaps_of_divergences": sorted(one.gap for one in comparison.divergences if one.gap is not None),
            "largest_logprob_difference": comparison.logprob_error,
        }
        more["defects"] = [(one.what, one.gap, dict(one.request.sampling)) for one in defects]
        what = f"greedy outputs that part from plain's where its two best tokens are {arguments.tie} or more apart"
        claimed.append(report.claim(what, len(defects), "0", not defects))
    print(json.dumps(more, indent=1))
    return report.finish("tests.soak", arguments.json, claimed, **more)


if __name__ == "__main__":
    sys.exit(main())
