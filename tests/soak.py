"""A soak of a running server: seeded mixed requests, many at a time, some of them aborted.

python -m tests.soak --url URL [--plain-url URL] [--requests 2000] [--concurrency 24] [--json FILE]

Every answer is checked against its request, the pools must be as full afterwards as before, and greedy outputs
are compared with those of a server without speculation. Where the two part, plain's logprobs of its two best
tokens at that position tell a tie (close ones, as bfloat16 rounds them) from a defect. Plain decoding counts
penalties up to the last token only with --disable-overlap-schedule.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

TIMEOUT = 300.0  # seconds, of any one request
LONGEST_PROMPT, MOST_NEW_TOKENS = 400, 48
ABORTED_SHARE, LONGEST_DELAY = 0.12, 0.4
GRAMMARS = (
    dict(regex="(ab|cd){2,9}!"),
    dict(regex="[a-z_]{3,24}"),
    dict(regex=r"[0-9]{1,4}\.[0-9]{2}"),
    dict(regex="(yes|no|maybe)( (yes|no))*"),
    dict(ebnf='root ::= ("x" | "y")+ "."'),
    dict(json_schema='{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'),
    dict(json_schema='{"type":"array","items":{"type":"boolean"},"maxItems":4}'),
    dict(json_schema='{"enum":["red","green","blue"]}'),
)


# ---- Requests ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Text that prompts and stop conditions are cut from, and the ids at which a request may stop by itself."""

    ids: Sequence[int]
    text: str
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class Request:
    body: Mapping[str, Any]  # of POST /generate
    abort: str | None = None  # "disconnect" or "abort_request", `delay` seconds after sending
    delay: float = 0.0

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self.body["sampling_params"]

    @property
    def greedy(self) -> bool:
        return self.sampling["temperature"] == 0

    @property
    def samples(self) -> int:
        return self.sampling.get("n", 1)


def corpus_of(tokenizer_path: str) -> Corpus:
    """The held-out text of the package's pair, in the tokens of a server's tokenizer."""
    from transformers import AutoTokenizer

    from dflash_sglang.pair import held_out_prompts

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, model_max_length=1_000_000)
    text = "\n".join(held_out_prompts())
    return Corpus(tokenizer.encode(text, add_special_tokens=False), text, frozenset([tokenizer.eos_token_id]))


def requests(count: int, seed: int, corpus: Corpus) -> list[Request]:
    """`count` requests, the same for the same arguments."""
    rng = random.Random(seed)
    anchors = [rng.randrange(len(corpus.ids) - LONGEST_PROMPT) for _ in range(12)]
    return [_request(rng, f"soak-{seed}-{i:06d}", corpus, anchors) for i in range(count)]


def _request(rng: random.Random, rid: str, corpus: Corpus, anchors: Sequence[int]) -> Request:
    prompt = _prompt(rng, corpus, anchors)
    sampling = _sampling(rng, corpus, prompt)
    body: dict[str, Any] = dict(rid=rid, input_ids=prompt, sampling_params=sampling, stream=rng.random() < 0.3)
    if rng.random() < 0.15:
        body |= dict(return_logprob=True, top_logprobs_num=rng.randint(0, 3))
        if rng.random() < 0.3:
            body |= dict(logprob_start_len=rng.randrange(len(prompt)))
        if rng.random() < 0.3:
            body |= dict(token_ids_logprob=rng.sample(prompt, min(2, len(prompt))))
    if rng.random() >= ABORTED_SHARE:
        return Request(body)
    # /abort_request knows no id of a sample of n > 1: SGLang gives each an id of its own.
    ways = ["disconnect"] if sampling.get("n", 1) > 1 else ["disconnect", "abort_request"]
    return Request(body, rng.choice(ways), LONGEST_DELAY * rng.random() ** 3)


def _up_to(rng: random.Random, most: int) -> int:
    """1 to `most`, as many below the square root as above."""
    return min(most, int((most + 1) ** rng.random()))


def _prompt(rng: random.Random, corpus: Corpus, anchors: Sequence[int]) -> list[int]:
    """1 to LONGEST_PROMPT tokens; most begin like others."""
    length = _up_to(rng, LONGEST_PROMPT)
    start = rng.randrange(len(corpus.ids) - LONGEST_PROMPT)
    own = rng.choice([0, 0, length // 2, length])  # tokens at the end that are the prompt's own
    anchor = rng.choice(anchors)
    return [*corpus.ids[anchor : anchor + length - own], *corpus.ids[start : start + own]]


def _sampling(rng: random.Random, corpus: Corpus, prompt: Sequence[int]) -> dict[str, Any]:
    def chance(share: float) -> bool:
        return rng.random() < share

    most = _up_to(rng, MOST_NEW_TOKENS)
    out: dict[str, Any] = dict(temperature=0, max_new_tokens=most, ignore_eos=chance(0.5))
    if chance(0.45):
        out["temperature"] = round(rng.uniform(0.3, 1.2), 2)
        out |= dict(top_k=rng.randint(1, 50)) if chance(0.4) else {}
        out |= dict(top_p=round(rng.uniform(0.5, 1.0), 2)) if chance(0.4) else {}
        out |= dict(min_p=round(rng.uniform(0.0, 0.3), 2)) if chance(0.3) else {}
    if chance(0.08):  # alone: without overlap, the order of SGLang's penalties differs from process to process
        out |= dict(repetition_penalty=round(rng.uniform(0.7, 1.5), 2))
    else:
        out |= dict(frequency_penalty=round(rng.uniform(-0.5, 1.5), 2)) if chance(0.08) else {}
        out |= dict(presence_penalty=round(rng.uniform(-0.5, 1.5), 2)) if chance(0.08) else {}
    if chance(0.12):
        out["logit_bias"] = {str(rng.choice(corpus.ids)): rng.choice([-100, -2.5, 1.5, 4]) for _ in range(3)}
    # One way of stopping at most, and one string: of the stops inside one accepted run SGLang does not take the
    # first, but a string before a token, and of strings the one that is listed first.
    way = rng.random()
    if way < 0.12:
        start = rng.randrange(len(corpus.text) - 3)
        out |= dict(stop=[corpus.text[start : start + rng.randint(1, 3)]], ignore_eos=True)
        out |= dict(no_stop_trim=True) if chance(0.3) else {}
    elif way < 0.24:
        out |= dict(
            stop_token_ids=sorted({rng.choice(prompt) for _ in range(rng.randint(1, 3))}), ignore_eos=False
        )
    elif way < 0.36:
        # With ignore_eos, plain decoding goes on for one token after the grammar's end.
        out |= dict(rng.choice(GRAMMARS), ignore_eos=False)
    if way >= 0.36 or way < 0.24:  # a grammar that asks for EOS and a minimum that forbids it leave no token
        out |= dict(min_new_tokens=rng.randint(1, most)) if chance(0.12) else {}
    out |= dict(n=2) if chance(0.05) else {}
    return out


# ---- The driver ----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came back of a request. `answers`: the final one of every sample."""

    request: Request
    status: int | None = None  # None where the client went away first
    answers: list[dict[str, Any]] = field(default_factory=list)
    partial: list[list[int]] = field(default_factory=list)  # output ids of each event of a stream
    error: str = ""

    @property
    def aborted(self) -> bool:
        """Whether the abort reached the request before its end."""
        if self.request.abort is None:
            return False
        return (self.status is None and not self.error) or any(
            finish_of(answer)["type"] == "abort" for answer in self.answers
        )


def finish_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    return answer["meta_info"]["finish_reason"] or {"type": None}


def call(url: str, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """(status, body) of one HTTP call; `body`: JSON, encoded where it is bytes."""
    connection = _connect(url)
    data = body if isinstance(body, bytes) else json.dumps(body)
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def drive(url: str, asked: Sequence[Request], concurrency: int) -> list[Outcome]:
    """Sends all requests, `concurrency` at a time, and returns their outcomes in order."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda request: _ask(url, request), asked))


def _connect(url: str, timeout: float = TIMEOUT) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)


def _ask(url: str, request: Request) -> Outcome:
    outcome = Outcome(request)
    leaves = request.abort == "disconnect"
    deadline = time.monotonic() + (request.delay if leaves else TIMEOUT)
    aborter = threading.Timer(request.delay, _abort, (url, request.body["rid"]))
    if request.abort == "abort_request":
        aborter.start()
    connection = _connect(url)
    try:
        connection.request("POST", "/generate", json.dumps(request.body), {"Content-Type": "application/json"})
        connection.sock.settimeout(max(1e-3, deadline - time.monotonic()))
        answer = connection.getresponse()
        with answer:
            if request.body["stream"] and answer.status == 200:
                _read_stream(answer, outcome, deadline)
            else:
                content = answer.read()
                if answer.status == 200:
                    parsed = json.loads(content)
                    outcome.answers = parsed if isinstance(parsed, list) else [parsed]
                else:
                    outcome.error = content.decode(errors="replace")
        outcome.status = answer.status
    except TimeoutError:
        outcome.error = "" if leaves else f"no answer within {TIMEOUT:.0f} s"
    except (OSError, http.client.HTTPException, ValueError) as error:  # the server went away
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
        if aborter.is_alive():
            aborter.join()
    return outcome


def _abort(url: str, rid: str) -> None:
    with suppress(OSError, http.client.HTTPException):  # a server that is gone shows in the request's own outcome
        call(url, "POST", "/abort_request", {"rid": rid})


def _read_stream(answer: http.client.HTTPResponse, outcome: Outcome, deadline: float) -> None:
    """Fills `answers` and `partial`. Raises TimeoutError at the deadline, ValueError where SGLang reports one."""
    last: dict[int, dict[str, Any]] = {}
    ended = False
    for line in answer:
        if line.strip() == b"data: [DONE]":
            ended = True
        elif line.startswith(b"data:"):
            event = json.loads(line[len(b"data:") :])
            if "error" in event:
                raise ValueError(event["error"])
            last[event.get("index", 0)] = event
            if outcome.request.samples == 1:
                outcome.partial.append(event["output_ids"])
        if time.monotonic() > deadline:
            raise TimeoutError
    if not ended:
        raise ValueError("the stream ended without [DONE]")
    outcome.answers = [last[index] for index in sorted(last)]


# ---- Checks of answers ---------------------------------------------------------------------------------------


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
        trimmed = not sampling.get("no_stop_trim", False)
        if matched not in sampling.get("stop", ()) or (matched in answer["text"]) == trimmed:
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


# ---- The pools -----------------------------------------------------------------------------------------------


def held_tokens(url: str) -> int:
    """Token slots of an idle server that are neither free nor a cached prefix that may be evicted.

    Every idle moment runs SGLang's own check of the pools, which ends the server where one leaks. It takes the
    word of locked prefixes that something uses them; this figure does not.
    """
    _wait_idle(url)
    time.sleep(1.0)  # several idle moments
    return sum(load["num_used_tokens"] for load in _wait_idle(url))


def _wait_idle(url: str, timeout: float = 60.0) -> list[dict[str, Any]]:
    """The loads of a server, one per data-parallel rank, once it runs nothing. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    while True:
        loads = json.loads(call(url, "GET", "/v1/loads")[1])["loads"]
        if not any(
            load["num_running_reqs"] + load["num_waiting_reqs"] + load["queues"]["grammar"] for load in loads
        ):
            return loads
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server still runs requests after {timeout:.0f} s: {loads}")
        time.sleep(0.1)


# ---- Comparison with plain decoding --------------------------------------------------------------------------


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


# ---- The whole soak ------------------------------------------------------------------------------------------


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
        flushed = call(url, "POST", "/flush_cache")[0] == 200 and held_tokens(url) == 0
        again = _ask(url, Request(as_plain(asked[0]).body))
        alive = flushed and not problems(again, corpus.eos_ids)
    return Soak(outcomes, corpus.eos_ids, seconds, before, after, alive)


def plain_answers(url: str, greedy: Sequence[Outcome], concurrency: int) -> list[Outcome]:
    return drive(url, [as_plain(outcome.request) for outcome in greedy], concurrency)


def claim(what: str, value: Any, bound: str, ok: bool) -> dict[str, Any]:
    return {"what": what, "value": value, "bound": bound, "ok": bool(ok)}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server under test")
    parser.add_argument("--plain-url", help="a server of the same target without speculation")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tie", type=float, default=0.13, help="largest gap of two logprobs that counts as a tie")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    soaked = soak(arguments.url, arguments.requests, arguments.concurrency, arguments.seed)
    report: dict[str, Any] = {
        "command": ["python", "-m", "tests.soak", *sys.argv[1:]],
        "figures": soaked.figures(),
        "problems": soaked.problems(),
        "claims": claims(soaked),
    }
    if arguments.plain_url:
        greedy = soaked.greedy
        plain = plain_answers(arguments.plain_url, greedy, arguments.concurrency)
        comparison = compare(greedy, plain)
        defects = comparison.defects(arguments.tie)
        report["figures"]["plain"] = {
            "compared": comparison.compared,
            "equal": comparison.compared - len(comparison.divergences),
            "equal_share": round(1 - len(comparison.divergences) / max(1, comparison.compared), 5),
            "gaps_of_divergences": sorted(one.gap for one in comparison.divergences if one.gap is not None),
            "largest_logprob_difference": comparison.logprob_error,
        }
        report["defects"] = [(one.what, one.gap, dict(one.request.sampling)) for one in defects]
        what = f"greedy outputs that part from plain's where its two best tokens are {arguments.tie} or more apart"
        report["claims"].append(claim(what, len(defects), "0", not defects))
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    return 0 if all(one["ok"] for one in report["claims"]) else 1


if __name__ == "__main__":
    sys.exit(main())
