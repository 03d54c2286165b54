"""Malformed requests: answered as by the same server without speculation, and their neighbours are unharmed.

Requests that end the scheduler of SGLang 0.5.23, or that it answers with an internal error or not at all
(`REFUSED`), are refused. Left out, because they are of the right form and end it all the same: a sampled request
whose grammar, bias and `min_new_tokens` leave no token (`DEAD_ENDS`), and a `stop_regex` that Python's re takes
for ever to match.

Good prompts come as embeddings of their tokens, too. A server without speculation ends where it prefills those
beside other requests, and one that retracts them answers with pieces of two generations.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dflash_sglang.demo.server import Server
from tests.soak import driver
from tests.support.engines import RETRACTING, greedy_params, serve
from training.pair import held_out_prompts, pair_directories

pytestmark = pytest.mark.slow

CONTEXT = 320
# With a prefix cache SGLang takes no embeddings.
FLAGS: dict[str, Any] = dict(
    skip_tokenizer_init=None, context_length=CONTEXT, disable_radix_cache=True, chunked_prefill_size=64
)
PROMPT = list(b"def f(x):\n    return ")
WIDTH = 256  # of the pair's embeddings
ROW = [0.5] * WIDTH
NAN, INFINITY = float("nan"), float("inf")  # JSON has neither; Python writes them all the same

SAMPLING: dict[str, list[Any]] = {
    "temperature": [-0.5, -1e-9, 1e308, "hot", "0.5", None, [1], {}, True, NAN, INFINITY],
    "top_p": [0, -0.1, 1.01, "x", None, [0.5], NAN],
    "top_k": [1.5, "3", None, 10**20],
    "min_p": [-0.1, 1.1, "x", None, NAN],
    "frequency_penalty": [-2.1, 2.1, "x", None, NAN],
    "presence_penalty": [-2.1, 2.1, "x", None, INFINITY],
    "repetition_penalty": [0, -1, 2.1, "x", None],
    "min_new_tokens": [-1, 9, 1.5, "3", None],
    "max_new_tokens": [-1, 0, 1.5, "8", True, None, CONTEXT, 5000, 2**31, 2**70],
    "n": [0, -1, 1.5, "2", None],
    "sampling_seed": [1.5, "x", 2**63, -(2**63) - 1],
    "beam_width": [0, -1, 2, "x"],
    "ignore_eos": ["yes", 1, None],
    "skip_special_tokens": ["x"],
    "stream_interval": [0, -1, "x"],
    "stop": [5, [5], ["a"] * 33, "", [""], {}, [None]],
    "stop_token_ids": [[-1], [320], [2**40], ["a"], [1.5], [None], 5, "7", {}],
    "stop_regex": ["a" * 300, 5, ["a"] * 33],
    "logit_bias": [{"320": 1}, {"-1": 1}, {"a": 1}, {"5": "x"}, {"5": None}, {"5": -1e39}, [5], "x"],
    "regex": ["(", "[", "a{", "(?=x)y", "", "a" * 20_000, 5, ["a"]],
    "json_schema": ["{", "x", '{"type":"nothing"}', '{"type":5}', "[]", "false", 5, {"a": 1}],
    "ebnf": ["root ::=", "x", "root ::= undefined_rule", 'a ::= "b"', 5],
    "structural_tag": ["{", "{}", 5],
    "custom_params": [5, "x", {"a": [[1]]}, {"__sglang_reasoning_end_token_ids": [5000]}],
    "unknown_field": [1],
}
WHOLE_REQUEST: dict[str, list[Any]] = {
    "unknown_field": [1],
    "return_hidden_states": [True, "last", "x", 5, [True]],
    "return_logprob": ["x", 5],
    "top_logprobs_num": ["x", 1.5, -1],
    "token_ids_logprob": [[320], [-1], [2**40], ["a"], "x"],
    "logprob_start_len": [1000, 2**40, "x"],
    "stream": ["x"],
    "rid": [5, "", ["a", "b"], []],
    "sampling_params": ["x", [{}], [], 5, None],
    "lora_path": ["x"],
    "custom_logit_processor": ["x", 5],
    "session_params": [{"id": "none"}, 5],
    "priority": ["x"],
    "max_thinking_tokens": [5],
    "return_sampling_mask": ["x"],
    "routed_dp_rank": [3],
    "watermark": [{"a": 1}],
    "extra_key": [5],
    "kv_hints": [5],
    "bootstrap_room": ["x"],
}
PROMPTS: dict[str, list[Any]] = {
    "input_ids": [[], "x", 5, {}, [1.5], ["a"], [None], [True], [2**70], [[65], [65] * 1000]],
    "text": [[], 5, [5], "a" * (CONTEXT - 1), "a" * 1000],
    "input_embeds": ["x", 5, {}, [5], [[None]], [["x"]], [["x"] * WIDTH], [[{}]], [[[[0.5]]]]],
}
TOGETHER: dict[str, dict[str, Any]] = {
    "regex and json_schema": dict(regex="a+", json_schema="{}"),
    "regex and ebnf": dict(regex="a+", ebnf='root ::= "a"'),
    "n=2 and a bad top_p": dict(n=2, top_p=2),
    "n=2 and a bad regex": dict(n=2, regex="("),
    "sampling and top_k=0": dict(temperature=1.0, top_k=0),
    "sampling and top_k=-2": dict(temperature=1.0, top_k=-2),
}
# Sampling parameters by their field, as it stands in the message; other requests next. Some of them end the server
# only beside a request that is sampled.
REFUSED: dict[str, list[dict[str, Any]]] = {
    "top_k": [dict(temperature=1.0, top_k=top_k) for top_k in (2**31, 2**62)],
    "logit_bias of 5": [dict(logit_bias={"5": bias}) for bias in (1e39, 3e38, 1e308)],
    "stop_token_ids": [dict(stop_token_ids=[9, token], min_new_tokens=2) for token in (-1, 320, 2**40)],
    "stop_regex": [
        dict(stop_regex=pattern)
        for pattern in ("(", ["a", "*"], "a{99999999999}", "(?<=a+)b", "(" * 120, "\\", "(?P<a>x)(?P<a>y)")
    ],
    "request": [dict(choice=[])],
}
REFUSED_WHOLE: dict[str, list[dict[str, Any]]] = {
    "input_ids": [
        *(dict(input_ids=[65, token]) for token in (320, 2**40, -1)),
        dict(input_ids=[[65], [65, 320]]),
        dict(input_ids=[[]]),
        dict(input_ids=[[65], []]),
        dict(input_ids=None, text=""),
        dict(input_ids=None, text=["a", ""]),
    ],
    "top_logprobs_num": [dict(return_logprob=True, top_logprobs_num=number) for number in (321, 2**40)],
    "logprob_start_len": [dict(return_logprob=True, logprob_start_len=start) for start in (-2, -(2**40))],
    "lora_id": [dict(lora_id=value) for value in ("x", ["x"], [])],
    "request": [dict(session_params={"unknown": 1})],
    "session_params id": [dict(session_params={"id": value}) for value in ([1], {})],
    "session_params rid": [dict(session_params={"id": "none", "rid": value}) for value in ([1], {})],
    "session_params offset": [dict(session_params={"id": "none", "offset": value}) for value in ("x", 1.5, [1])],
    "positional_embed_overrides": [
        dict(positional_embed_overrides=value) for value in (5, 0, "x", [[[0.5]], [0]], {"embeds": 1})
    ],
}
EMBEDS: list[Any] = [
    *([], [[]], [[[]]], [[], ROW]),
    *([ROW[1:]], [[*ROW, 0.5]], [ROW, ROW[1:]], [[0.5]], [[ROW], [ROW, ROW[1:]]]),
    *([ROW, [1e39, *ROW[1:]]], [[*ROW[1:], -1e300]]),
]
# No token is left. They are sent while all others are greedy: SGLang's torch sampler, which serves a running batch
# from its first request that samples on, raises on such a row.
DEAD_ENDS: dict[str, dict[str, Any]] = {
    "a grammar without an end": dict(json_schema='{"$ref":"#"}'),
    "a grammar that only EOS ends, and min_new_tokens": dict(regex="ab", min_new_tokens=6, ignore_eos=False),
    "a grammar whose tokens are all forbidden": dict(regex="[ab]{9}", logit_bias={"97": -1e39, "98": -1e39}),
    "every token a stop token, and min_new_tokens": dict(
        stop_token_ids=list(range(320)), min_new_tokens=4, ignore_eos=False
    ),
}
# SGLang refuses these itself with any speculation; the second one only where it finds no CUDA kernel for it.
REFUSED_WITH_SPECULATION = {
    "beam_width=2": "Beam search is not supported with speculative decoding.",
    "sampling and return_sampling_mask": (
        "return_sampling_mask with non-greedy DFlash decoding requires sampling verification support."
    ),
}


def request(**sampling: Any) -> dict[str, Any]:
    return dict(input_ids=PROMPT, sampling_params={**greedy_params(8), **sampling})


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 50 else f"{text[:40]}.. ({len(text)})"


def bodies() -> dict[str, bytes]:
    """What is sent, by what is wrong with it."""
    found: dict[str, Any] = {}
    for name, values in SAMPLING.items():
        found |= {f"{name}={shown(value)}": request(**{name: value}) for value in values}
    for name, values in WHOLE_REQUEST.items():
        found |= {
            f"{name}={shown(value)} outside": {**request(), "return_logprob": True, name: value}
            for value in values
        }
    for name, values in PROMPTS.items():
        found |= {
            f"{name}={shown(value)}": dict(sampling_params=greedy_params(8), **{name: value}) for value in values
        }
    for length in range(CONTEXT - 8, CONTEXT + 2):  # around the longest prompt that is served
        found[f"a prompt of {length}"] = dict(input_ids=[65] * length, sampling_params=greedy_params(2))
    found |= {name: request(**sampling) for name, sampling in TOGETHER.items()}
    found["sampling and return_sampling_mask"] = request(temperature=1.0, top_k=5) | dict(
        return_sampling_mask=True
    )
    found["a prompt beside embeddings"] = request() | dict(input_embeds=[ROW])
    found["every kind of prompt"] = request() | dict(input_embeds=[ROW], text="a")
    found["no prompt"] = dict(sampling_params={})
    found["a list for a request"] = [1, 2]
    found["a string for a request"] = "x"
    found["a batch with a bad temperature"] = batch_with(temperature=-1)
    found["a batch with a bad regex"] = batch_with(regex="(")
    found["a batch with one rid twice"] = {**batch_with(), "rid": ["a", "a"]}
    found["a stream with a bad temperature"] = request(temperature=-1) | dict(stream=True)
    found["a stream with a bad regex"] = request(regex="(") | dict(stream=True)
    raw = {"half of a JSON object": b'{"input_ids": [1, 2', "an empty body": b"", "no UTF-8": b"\xff\xfe"}
    return {name: json.dumps(body).encode() for name, body in found.items()} | raw


def embedded(rows: Any, **sampling: Any) -> dict[str, Any]:
    return dict(input_embeds=rows, sampling_params=greedy_params(8, **sampling))


def refused() -> dict[str, tuple[str, bytes]]:
    """{what is wrong: the field that a message names, what is sent}; whole and as a stream."""
    found = [(field, request(**sampling)) for field, cases in REFUSED.items() for sampling in cases]
    found += [(field, {**request(), **more}) for field, cases in REFUSED_WHOLE.items() for more in cases]
    found += [("input_embeds", embedded(rows)) for rows in EMBEDS]
    found.append(("input_embeds", embedded([ROW]) | dict(session_params={"id": "none"})))
    return {
        f"{field}, {number}, stream={stream}": (field, json.dumps({**body, "stream": stream}).encode())
        for number, (field, body) in enumerate(found)
        for stream in (False, True)
    }


def dead_ends() -> dict[str, bytes]:
    return {name: json.dumps(request(**sampling)).encode() for name, sampling in DEAD_ENDS.items()}


def batch_with(**sampling: Any) -> dict[str, Any]:
    return dict(input_ids=[PROMPT, PROMPT], sampling_params=[greedy_params(4), greedy_params(4, **sampling)])


def essence(body: bytes, status: int, answer: bytes) -> tuple[int, Any]:
    """(status, what a user sees of an answer): greedy ids, what is certain of sampled ones, messages whole."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] ", "", answer.decode(errors="replace"))  # xgrammar tells the time
    if text.startswith("data:"):
        events = [json.loads(line[len("data:") :]) for line in text.splitlines() if line.startswith("data: {")]
        ends = [event.get("error", event.get("meta_info", {}).get("finish_reason")) for event in events]
        return status, [end for end in ends if end is not None]  # a retracted request tells what it has so far
    if status != 200:
        return status, text
    answers = json.loads(text)
    seen = []
    for one in answers if isinstance(answers, list) else [answers]:
        ids, finish = one["output_ids"], one["meta_info"]["finish_reason"]
        if b'"temperature": 0,' in body:
            seen.append((ids, finish))
        elif b'"ignore_eos": true' in body:
            seen.append((len(ids), finish))
        else:  # a draw decides where it ends
            seen.append(finish["type"] in ("stop", "length"))
    return status, seen


def streamed(server: Server, request: dict[str, Any]) -> list[int]:
    """The output ids of a request, as its client puts them together."""
    events = list(server.stream(**request))
    ids = events[-1]["output_ids"]
    assert all(event["output_ids"] == ids[: len(event["output_ids"])] for event in events)
    return ids


def neighbours() -> list[dict[str, Any]]:
    prompts = [list(text.encode()[:120]) for text in held_out_prompts()[-8:]]
    return [dict(input_ids=prompt, sampling_params=greedy_params(40)) for prompt in prompts]


def as_embeddings(request: dict[str, Any]) -> dict[str, Any]:
    table = load_file(Path(pair_directories()["target"]) / "model.safetensors")[
        "model.embed_tokens.weight"
    ].float()
    return {**request, "input_ids": None, "input_embeds": table[request["input_ids"]].tolist()}


def send(server: Server, name: str, body: bytes) -> tuple[int, Any]:
    try:
        return essence(body, *driver.call(server.url, "POST", "/generate", body))
    except (OSError, http.client.HTTPException) as error:
        raise AssertionError(
            f"no answer to {name}, or to another request sent with it: {server.log_tail()}"
        ) from error


def harass(server: Server, refuses: bool = False) -> dict[str, Any]:
    """The server's answers to all bad requests, and meanwhile to good ones, again and again; `refuses`: what ends
    others, and some of the good ones are embeddings."""
    good, over = neighbours(), threading.Event()
    sent = [as_embeddings(one) if refuses and i % 2 else one for i, one in enumerate(good)]

    def neighbour(first: int) -> list[tuple[int, list[int]]]:
        seen = []
        for turn in count(first):
            seen.append((turn % len(good), streamed(server, sent[turn % len(sent)])))
            if over.is_set():
                return seen
        raise AssertionError("unreachable")

    with ThreadPoolExecutor(4) as senders, ThreadPoolExecutor(3) as pool:
        beside = [pool.submit(neighbour, first) for first in range(3)]
        try:
            answers = {name: send(server, name, body) for name, body in dead_ends().items()}
            bad = bodies() | ({name: body for name, (_, body) in refused().items()} if refuses else {})
            answers |= senders.map(lambda item: (item[0], send(server, *item)), bad.items())
        finally:
            over.set()
        return {
            "answers": answers,
            "beside": [one for future in beside for one in future.result()],
            "held": driver.held_tokens(server.url),
            "log": server.log_text(),
        }


@pytest.fixture(scope="module")
def servers() -> dict[str, Any]:
    """What a server without speculation and ours gave, of the same flags, one after the other."""
    target, draft = (Path(pair_directories()[name]) for name in ("target", "draft"))
    with serve(target, **FLAGS) as server:
        alone = [server.generate(**one)["output_ids"] for one in neighbours()]
        plain = harass(server)
    with serve(target, draft, environment={"DFLASH_SGLANG_REQUIRE": "1", **RETRACTING}, **FLAGS) as server:
        return {"plain": plain, "ours": harass(server, refuses=True), "alone": alone}


def test_bad_requests_are_answered_as_without_speculation(servers):
    plain, ours = servers["plain"]["answers"], servers["ours"]["answers"]
    statuses = [status for status, _ in plain.values()]
    assert len(statuses) >= 180 and statuses.count(400) >= 120 and statuses.count(200) >= 30
    differing = {name: (ours[name], plain[name]) for name in plain if ours[name] != plain[name]}
    for name, message in REFUSED_WITH_SPECULATION.items():
        status, text = differing.pop(name)[0]
        assert (status, json.loads(text)) == (400, {"error": {"message": message}})
    assert differing == {}


def test_requests_that_end_the_server_without_speculation_are_refused_by_field(servers):
    for name, (field, body) in refused().items():
        status, answer = servers["ours"]["answers"][name]
        if b'"stream": true' in body and status == 200:
            (error,) = answer
        else:
            assert status == 400, (name, answer)
            error = json.loads(answer)["error"]
            error = dict(message=error) if isinstance(error, str) else error  # of a body
        assert error.get("code", 400) == 400 and error["message"].startswith(field), (name, error)
        assert "expected" in error["message"] and len(error["message"]) < 400


def test_the_neighbours_of_bad_requests_get_plain_greedy_output(servers):
    beside = servers["ours"]["beside"]
    assert len(beside) >= 12
    assert [(i, ids) for i, ids in beside if ids != servers["alone"][i]] == []


def test_bad_requests_hold_no_slots_and_end_no_process(servers):
    ours = servers["ours"]
    assert ours["held"] == servers["plain"]["held"] == 0
    assert "Scheduler hit an exception" not in ours["log"] and "memory leak" not in ours["log"]
