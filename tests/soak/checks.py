"""What is wrong with an answer: by itself, and beside plain decoding's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from tests.soak.driver import Outcome, finish_of
from tests.soak.requests import Request


def problems(outcome: Outcome, eos_ids: frozenset[int]) -> list[str]:
    """What is wrong with the answer to a request that ran to its end; empty where nothing is."""
    if outcome.error or outcome.status != 200:
        return [f"status {outcome.status}: {outcome.error}"]
    found = []
    if len(outcome.answers) != outcome.request.samples:
        found.append(f"{len(outcome.answers)} answers")
    for answer in outcome.answers:
        found += _answer_problems(outcome.request, answer, eos_ids)
    for earlier, later in zip(outcome.partial, outcome.partial[1:], strict=False):
        if later[: len(earlier)] != earlier:
            found.append(f"the stream took back tokens: {earlier} became {later}")
    return found


def _answer_problems(request: Request, answer: Mapping[str, Any], eos_ids: frozenset[int]) -> Iterator[str]:
    sampling, meta, ids = request.sampling, answer["meta_info"], answer["output_ids"]
    finish, most = finish_of(answer), sampling["max_new_tokens"]
    # SGLang's ignore_eos ignores stop_token_ids too.
    stop_ids = set() if sampling["ignore_eos"] else eos_ids | set(sampling.get("stop_token_ids", ()))
    constrained = {"regex", "json_schema", "ebnf"} & sampling.keys()
    if len(ids) > most or not ids:
        yield f"{len(ids)} tokens, at most {most} asked for"
    if meta["completion_tokens"] != len(ids):
        yield f"completion_tokens {meta['completion_tokens']}, {len(ids)} ids"
    if meta["prompt_tokens"] != len(request.body["input_ids"]):
        yield f"prompt_tokens {meta['prompt_tokens']}"
    if request.samples == 1 and meta["id"] != request.body["rid"]:
        yield f"answer of {meta['id']}"
    if stop_ids & set(ids[:-1]):
        yield f"a stop token of {sorted(stop_ids)} in the middle of {ids}"
    matched = finish.get("matched")
    if finish["type"] == "length":
        if len(ids) != most:
            yield f"finish_reason length after {len(ids)} of {most} tokens"
    elif finish["type"] != "stop":
        yield f"finish_reason {finish}"
    elif isinstance(matched, str):
        # SGLang looks into the names of special tokens as well, which the text leaves out.
        in_name = ids[-1] in eos_ids
        trimmed = not sampling.get("no_stop_trim", False)
        if matched not in sampling.get("stop", ()) or (matched in answer["text"]) == (trimmed or in_name):
            yield f"stopped at {matched!r} with text {answer['text']!r}"
    elif [matched] != ids[-1:] or matched not in stop_ids:
        yield f"stopped at token {matched} with ids {ids}"
    elif len(ids) < sampling.get("min_new_tokens", 0):
        yield f"{len(ids)} tokens, at least {sampling['min_new_tokens']} asked for"
    elif constrained and not _obeys(sampling, answer["text"]):
        yield f"text {answer['text']!r} does not obey the grammar"
    if request.body.get("return_logprob"):
        yield from _logprob_problems(request, meta, ids)


def _obeys(sampling: Mapping[str, Any], text: str) -> bool:
    if "regex" in sampling:
        return re.fullmatch(sampling["regex"], text) is not None
    if "ebnf" in sampling:
        return re.fullmatch("[xy]+[.]", text) is not None
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _logprob_problems(request: Request, meta: Mapping[str, Any], ids: Sequence[int]) -> Iterator[str]:
    chosen = meta["output_token_logprobs"]
    if [token for _, token, _ in chosen] != list(ids):
        yield "output_token_logprobs are of other tokens"
    if any(not value <= 1e-6 for value, _, _ in chosen):
        yield "a logprob above zero, or none"
    if best := request.body["top_logprobs_num"]:
        if [len(row) for row in meta["output_top_logprobs"]] != [best] * len(ids):
            yield "output_top_logprobs of another size"
    start = request.body.get("logprob_start_len")
    if start is not None and len(meta["input_token_logprobs"]) != len(request.body["input_ids"]) - start:
        yield f"{len(meta['input_token_logprobs'])} input_token_logprobs from {start}"


@dataclass(frozen=True)
class Divergence:
    request: Request
    what: str
    gap: float | None  # between plain's two best logprobs where the tokens part; None where no token differs


def as_plain(request: Request) -> Request:
    """The same request, not aborted, with the logprobs that tell a tie."""
    body = {**request.body, "stream": False, "return_logprob": True}
    return Request({**body, "top_logprobs_num": max(2, request.body.get("top_logprobs_num", 0))})


def divergence(request: Request, ours: Mapping[str, Any], plain: Mapping[str, Any]) -> Divergence | None:
    """Where an answer differs from plain decoding's, or None."""
    got, expected = ours["output_ids"], plain["output_ids"]
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(got, expected, strict=False))))
    if same < min(len(got), len(expected)):
        values = sorted((row[0] for row in plain["meta_info"]["output_top_logprobs"][same]), reverse=True)
        what = f"token {same}: {got[same]}, plain {expected[same]}"
        return Divergence(request, what, values[0] - values[1])
    for name in ("output_ids", "text"):
        if ours[name] != plain[name]:
            return Divergence(request, f"{name}: {ours[name]!r}, plain {plain[name]!r}", None)
    if finish_of(ours) != finish_of(plain):
        return Divergence(request, f"finish: {finish_of(ours)}, plain {finish_of(plain)}", None)
    return None


def logprob_error(request: Request, ours: Mapping[str, Any], plain: Mapping[str, Any]) -> float:
    """The largest difference of the logprobs of prompt and output tokens; 0 where none were asked for."""
    if not request.body.get("return_logprob"):
        return 0.0
    largest = 0.0
    for name in ("output_token_logprobs", "input_token_logprobs"):
        pairs = zip(ours["meta_info"].get(name, ()), plain["meta_info"].get(name, ()), strict=True)
        largest = max([largest, *(abs(a[0] - b[0]) for a, b in pairs if a[0] is not None)])
    return largest


@dataclass
class Comparison:
    compared: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    logprob_error: float = 0.0

    def defects(self, tie: float) -> list[Divergence]:
        return [one for one in self.divergences if one.gap is None or one.gap >= tie]


def compare(ours: Sequence[Outcome], plain: Sequence[Outcome]) -> Comparison:
    """Answers of one server against those of the other, request by request and sample by sample."""
    out = Comparison()
    for got, expected in zip(ours, plain, strict=True):
        for a, b in zip(got.answers, expected.answers, strict=True):
            out.compared += 1
            parted = divergence(got.request, a, b)
            if parted is not None:
                out.divergences.append(parted)
            else:
                out.logprob_error = max(out.logprob_error, logprob_error(got.request, a, b))
    return out
