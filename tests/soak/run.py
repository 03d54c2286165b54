"""A soak of a running server: seeded mixed requests, many at a time, some of them aborted.

python -m tests.soak --url URL [--plain-url URL] [--requests 2000] [--concurrency 24] [--json FILE]

Every answer is checked against its request, the pools must be as full afterwards as before, and greedy outputs
are compared with those of a server without speculation. Where the two part, plain's logprobs of its two best
tokens at that position tell a tie (close ones, as bfloat16 rounds them) from a defect. Plain decoding counts
penalties up to the last token only with --disable-overlap-schedule.
"""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import claim, finish
from dflash_sglang.bench.script import script_parser
from tests.soak.checks import as_plain, compare, problems
from tests.soak.driver import Outcome, ask, call, drive, held_tokens
from tests.soak.requests import Request, corpus_of, requests


@dataclass
class Soak:
    """A soaked server: what it answered, and what it held before and after."""

    outcomes: list[Outcome]
    eos_ids: frozenset[int]
    seconds: float
    held_before: int
    held_after: int
    alive: bool  # it answers after the soak, and gives its whole cache back

    @property
    def finished(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.aborted]

    @property
    def greedy(self) -> list[Outcome]:
        """What plain decoding must repeat: requests without randomness that no abort met."""
        return [outcome for outcome in self.finished if outcome.request.greedy and outcome.status == 200]

    def problems(self) -> dict[str, list[str]]:
        """By request id."""
        found = {o.request.body["rid"]: problems(o, self.eos_ids) for o in self.finished}
        return {rid: what for rid, what in found.items() if what}

    def figures(self) -> dict[str, Any]:
        answers = [answer["meta_info"] for outcome in self.finished for answer in outcome.answers]
        tokens = sum(meta["completion_tokens"] for meta in answers)
        steps = sum(meta.get("spec_verify_ct", 0) for meta in answers)
        return {
            "requests": len(self.outcomes),
            "seconds": round(self.seconds, 2),
            "answered": len(self.finished),
            "aborted": dict(Counter(o.request.abort for o in self.outcomes if o.aborted)),
            "answered before their abort": sum(o.request.abort is not None for o in self.finished),
            "answers": len(answers),
            "output_tokens": tokens,
            "finish_reasons": dict(Counter(meta["finish_reason"]["type"] for meta in answers)),
            "tokens_per_verify_step": round((tokens - len(answers)) / steps, 3) if steps else None,
            "held_tokens": {"before": self.held_before, "after": self.held_after},
        }


def soak(url: str, count: int, concurrency: int, seed: int) -> Soak:
    """Drives a server with `count` requests. What it holds is read before its cache is given back."""
    corpus = corpus_of(json.loads(call(url, "GET", "/model_info")[1])["tokenizer_path"])
    asked = requests(count, seed, corpus)
    before = held_tokens(url)
    start = time.perf_counter()
    outcomes = drive(url, asked, concurrency)
    seconds = time.perf_counter() - start
    after, alive = -1, False
    with suppress(OSError, http.client.HTTPException):  # of a server that is gone
        after = held_tokens(url)
        flushed = call(url, "POST", "/flush_cache?timeout=60")[0] == 200 and held_tokens(url) == 0
        again = ask(url, Request(as_plain(asked[0]).body))
        alive = flushed and not problems(again, corpus.eos_ids)
    return Soak(outcomes, corpus.eos_ids, seconds, before, after, alive)


def plain_answers(url: str, greedy: Sequence[Outcome], concurrency: int) -> list[Outcome]:
    return drive(url, [as_plain(outcome.request) for outcome in greedy], concurrency)


def claims(soaked: Soak) -> list[dict[str, Any]]:
    wrong = soaked.problems()
    kinds = soaked.figures()["aborted"]
    return [
        claim("requests that ran to their end and were not answered properly", len(wrong), "0", not wrong),
        claim("aborts that met their request, of both kinds", kinds, "> 0 each", len(kinds) == 2),
        claim(
            "token slots held by the idle server after the soak",
            soaked.held_after,
            f"{soaked.held_before}, as before",
            soaked.held_after == soaked.held_before,
        ),
        claim("the server answers afterwards and gives its cache back", soaked.alive, "true", soaked.alive),
    ]


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
        claimed.append(claim(what, len(defects), "0", not defects))
    print(json.dumps(more, indent=1))
    return finish("tests.soak", arguments.json, claimed, **more)
