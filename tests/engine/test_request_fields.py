"""Every field of a request acts as it does without speculation: C17.

A table of requests goes to a server without speculation once and to ours one by one and all at once. Each field
must have had an effect on the plain server. Plain runs without overlap scheduling: with it, SGLang's own
penalties and stateful logit processors lag one token behind. Both servers sample with seeds.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.soak import driver
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import ask_at_once, serve
from training.pair import held_out_prompts, pair_directories

pytestmark = pytest.mark.slow

NEW_TOKENS = 48
SPACE, E = ord(" "), ord("e")  # the pair's tokens below 256 are bytes
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'

# field -> (parameters, the rest of the request); each is sent with several prompts.
SAMPLING: dict[str, dict[str, Any]] = {
    "frequency_penalty": dict(frequency_penalty=0.7),
    "a negative frequency_penalty": dict(frequency_penalty=-0.6),
    "presence_penalty": dict(presence_penalty=1.5),
    "repetition_penalty": dict(repetition_penalty=1.4),
    "a repetition_penalty below 1": dict(repetition_penalty=0.6),
    # Not with a repetition penalty: SGLang without overlap applies them in an order that differs between runs.
    "all additive penalties": dict(frequency_penalty=0.3, presence_penalty=0.4, min_new_tokens=9),
    "logit_bias": dict(logit_bias={str(SPACE): -6.0, str(E): 2.5}),
    "bias and penalty": dict(logit_bias={str(E): 4.0}, frequency_penalty=0.5),
    "max_new_tokens": dict(max_new_tokens=19),
    "stop_token_ids": dict(stop_token_ids=[SPACE], ignore_eos=False),
    "stop": dict(stop=["r ", "t "], ignore_eos=False),
    "stop and no_stop_trim": dict(stop=["r ", "t "], no_stop_trim=True, ignore_eos=False),
    # The one listed first comes last in what prompt 0 gives.
    "several stop strings": dict(stop=["object", "socket"], ignore_eos=False),
    "stop and stop_token_ids": dict(stop=["object"], stop_token_ids=[ord("k")], ignore_eos=False),
    "stop_regex": dict(stop_regex=["[aeiou][st]"], ignore_eos=False),
    "min_new_tokens with stop_token_ids": dict(stop_token_ids=[SPACE], min_new_tokens=21, ignore_eos=False),
    "regex": dict(regex="([a-f]{2,5}[.] ){3}", ignore_eos=False),
    "json_schema": dict(json_schema=SCHEMA, ignore_eos=False),
    "ebnf": dict(ebnf='root ::= "yes " | "no " root', ignore_eos=False),
    # With a filter each: SGLang seeds filtered and unfiltered batches differently.
    "sampling_seed": dict(temperature=1.0, top_p=0.999, sampling_seed=7),
    "sampling_seed and filters": dict(temperature=0.8, top_k=12, top_p=0.9, sampling_seed=8),
    "sampling_seed and penalties": dict(temperature=1.0, top_k=200, frequency_penalty=0.4, sampling_seed=9),
    "regex and penalties": dict(regex="[a-z ]{30,40}", presence_penalty=1.0, ignore_eos=False),
}
NO_REPEAT = DeepseekOCRNoRepeatNGramLogitProcessor().to_str()
REQUEST: dict[str, dict[str, Any]] = {
    "custom_logit_processor": dict(
        custom_logit_processor=DisallowedTokensLogitsProcessor().to_str(),
        sampling_params=dict(custom_params={"token_ids": [SPACE]}),
    ),
    "a custom_logit_processor that reads the output": dict(
        custom_logit_processor=NO_REPEAT,
        sampling_params=dict(custom_params={"ngram_size": 2, "window_size": 90}),
    ),
    "a custom_logit_processor and a penalty": dict(
        custom_logit_processor=NO_REPEAT,
        sampling_params=dict(custom_params={"ngram_size": 3, "window_size": 40}, frequency_penalty=0.4),
    ),
}
LOGPROBS: dict[str, Any] = dict(
    return_logprob=True, top_logprobs_num=3, token_ids_logprob=[E, SPACE], logprob_start_len=5
)
ADD = dict(
    type="function",
    function=dict(
        name="add",
        parameters=dict(type="object", properties=dict(a=dict(type="integer"), b=dict(type="integer"))),
    ),
)
TOOL_CHOICES: list[Any] = ["none", "auto", "required", dict(type="function", function=dict(name="add"))]
NO_TOKENS: dict[str, dict[str, Any]] = {
    "no token": dict(),
    "no token and its logprob": dict(return_logprob=True),
    "no token and all logprobs": LOGPROBS,
}


def prompts() -> list[str]:
    return [text[:90] for text in held_out_prompts()[:3]]


def base_requests() -> list[dict[str, Any]]:
    return [
        dict(text=prompt, sampling_params=dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True))
        for prompt in prompts()
    ]


def with_field(request: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    sampling = {**request["sampling_params"], **field.get("sampling_params", {})}
    return {**request, **field, "sampling_params": sampling}


def table() -> dict[str, list[dict[str, Any]]]:
    """{field: its requests}"""
    fields = {name: dict(sampling_params=parameters) for name, parameters in SAMPLING.items()} | REQUEST
    requests = {name: [with_field(base, field) for base in base_requests()] for name, field in fields.items()}
    requests["logprobs"] = [with_field(base, LOGPROBS) for base in base_requests()]
    requests["logprobs and penalties"] = [
        with_field(base, {**LOGPROBS, "sampling_params": SAMPLING["all additive penalties"]})
        for base in base_requests()
    ]
    requests["n"] = [with_field(base, dict(sampling_params=dict(n=2))) for base in base_requests()]
    return requests


def without_tokens() -> dict[str, list[dict[str, Any]]]:
    """{name: requests} for the prompt alone"""
    none = dict(sampling_params=dict(max_new_tokens=0))
    requests = {
        name: [with_field(base, {**asked, **none}) for base in base_requests()]
        for name, asked in NO_TOKENS.items()
    }
    # Prefilled together: SGLang samples for both.
    sampling = [dict(temperature=0, max_new_tokens=count) for count in (0, 3)]
    both = dict(input_ids=[list(prompt.encode()) for prompt in prompts()[:2]], sampling_params=sampling)
    return requests | {"no token beside a request for some": [{**both, **LOGPROBS}]}


def essence(answer: Any) -> Any:
    """What must be equal exactly."""
    if isinstance(answer, list):
        return [essence(one) for one in answer]
    meta = answer["meta_info"]
    counts = (meta["prompt_tokens"], meta["completion_tokens"])
    return answer["output_ids"], answer["text"], meta["finish_reason"], counts


def numbers(answer: dict[str, Any]) -> list[float]:
    """Every logprob of an answer, and the ids beside it, in order."""
    found: list[float] = []

    def collect(entry: Any) -> None:
        if isinstance(entry, list):
            for item in entry:
                collect(item)
        elif isinstance(entry, int | float):
            found.append(entry)

    for key in sorted(answer["meta_info"]):
        if key.endswith("_logprobs"):
            collect(answer["meta_info"][key])
    return found


def tool_calls(server: Server) -> list[Any]:
    """What a chat with a tool gives, by its tool_choice."""
    asked = [dict(role="user", content="Add 17 and 4.")]
    seen = []
    for choice in TOOL_CHOICES:
        body = dict(model="default", messages=asked, tools=[ADD], tool_choice=choice, temperature=0, max_tokens=48)
        status, answer = driver.call(server.url, "POST", "/v1/chat/completions", body)
        assert status == 200, answer
        (one,) = json.loads(answer)["choices"]
        calls = [call["function"] for call in one["message"].get("tool_calls") or ()]
        seen.append((one["message"]["content"], calls, one["finish_reason"]))
    return seen


def pair() -> tuple[Path, Path]:
    directories = pair_directories()
    return Path(directories["target"]), Path(directories["draft"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, list[Any]]:
    """{field: answers} of the server without speculation, and "" for the requests without any field."""
    path = scheduler_hooks.install(tmp_path_factory.mktemp("hooks"))
    environment = {"PYTHONPATH": path, scheduler_hooks.HOOKS_ENV: "seeds"}
    with serve(
        pair()[0],
        environment=environment,
        skip_tokenizer_init=None,
        enable_custom_logit_processor=True,
        tool_call_parser="qwen25",
        disable_overlap_schedule=True,
    ) as server:
        asked = {"": base_requests(), **table(), **without_tokens()}
        return {name: ask_at_once(server, requests) for name, requests in asked.items()} | {
            "tools": tool_calls(server)
        }


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Server:
    """Rows of any number in recorded graphs, and mixed prefill."""
    hooks, config = "poison,seeds,widths,shares,trees", '{"width": {"trees": [16, 32]}}'
    environment = recorded_graphs.recording(tmp_path_factory.mktemp("graphs"), hooks, **{CONFIG_ENV: config})
    arguments: dict[str, Any] = dict(
        skip_tokenizer_init=None,
        enable_custom_logit_processor=True,
        tool_call_parser="qwen25",
        enable_mixed_chunk=True,
        chunked_prefill_size=64,
    )
    with serve(*pair(), environment=environment, **arguments) as server:
        yield server
        print(server.log_tail(60))  # shown with a failure


def differences(plain: dict[str, list[Any]], answers: dict[str, list[Any]]) -> list[str]:
    found = []
    for name in answers:
        for i, (got, expected) in enumerate(zip(answers[name], plain[name], strict=True)):
            if essence(got) != essence(expected):
                found.append(f"{name} (prompt {i}): {essence(got)} where plain decoding gives {essence(expected)}")
    return found


def test_every_field_had_an_effect_on_plain_decoding(plain):
    for name in SAMPLING | REQUEST:
        changed = [essence(a) != essence(b) for a, b in zip(plain[name], plain[""], strict=True)]
        assert any(changed), name
    assert all(len(numbers(answer)) > 5 * NEW_TOKENS for answer in plain["logprobs"])


def test_every_field_acts_as_in_plain_decoding_one_by_one(plain, ours):
    answers = {name: [ours.generate(**requests[0])] for name, requests in table().items()}
    assert not differences({name: expected[:1] for name, expected in plain.items()}, answers)
    for name in ("logprobs", "logprobs and penalties"):
        for got, expected in zip(answers[name], plain[name][:1], strict=True):
            assert numbers(got) == pytest.approx(numbers(expected), abs=1e-3)


def test_a_request_for_no_token_has_the_logprobs_of_plain_sglang(plain, ours):
    for name, requests in without_tokens().items():
        answers = [ours.generate(**request) for request in requests]
        assert not differences(plain, {name: answers})
        for got, expected in zip(single(answers), single(plain[name]), strict=True):
            assert listed(got) == listed(expected)
            assert numbers(got) == pytest.approx(numbers(expected), abs=1e-3)
    assert listed(plain["no token and all logprobs"][0])["output_token_logprobs"] == 0
    assert listed(plain["no token beside a request for some"][0][0])["output_token_logprobs"] == 1


def test_tools_are_called_as_in_plain_decoding(plain, ours):
    assert tool_calls(ours) == plain["tools"]
    _, auto, *forced = plain["tools"]
    assert all(one != auto for one in forced)


def single(answers: list[Any]) -> list[dict[str, Any]]:
    return [one for answer in answers for one in (answer if isinstance(answer, list) else [answer])]


def listed(answer: dict[str, Any]) -> dict[str, int | None]:
    """{list of logprobs: its length}"""
    lists = {key: value for key, value in answer["meta_info"].items() if key.endswith("_logprobs")}
    return {key: None if value is None else len(value) for key, value in lists.items()}


def all_at_once(server: Server, fields: Iterable[str]) -> dict[str, list[Any]]:
    """{field: answers}"""
    of_field = table()
    asked = [(name, request) for name in fields for request in of_field[name]]
    with ThreadPoolExecutor(len(asked)) as pool:
        got = list(pool.map(lambda one: server.generate(**one[1]), asked))
    answers: dict[str, list[Any]] = {}
    for (name, _), answer in zip(asked, got, strict=True):
        answers.setdefault(name, []).append(answer)
    return answers


def test_every_field_acts_as_in_plain_decoding_all_at_once(plain, ours):
    assert not differences(plain, all_at_once(ours, table()))


def test_what_adjusts_logits_acts_on_ragged_rows_all_at_once(plain, ours):
    """A custom processor, or what reports logits, would keep the whole batch to blocks of one width."""
    before = steps(ours)
    assert not differences(plain, all_at_once(ours, SAMPLING))
    made = {form: count - before.get(form, 0) for form, count in steps(ours).items()}
    assert "not_ragged" in made or made["ragged"] > 20


def steps(server: Server) -> dict[str, int]:
    """Steps that are ragged, and that could not be as the server is."""
    (state,) = server.get("/server_info")["internal_states"]
    shapes = state["dflash_acceptance"]["shapes"]
    of = dict(ragged=sum(shapes.get("ragged", {}).values()), **shapes.get("whole", {}))
    return {form: of[form] for form in ("ragged", "not_ragged") if form in of}


def test_a_greedy_request_is_told_its_own_tokens_as_sampling_masks(ours):
    answer = ours.generate(**{**base_requests()[0], "return_sampling_mask": True})
    masks = answer["meta_info"]["output_token_sampling_mask"]
    assert masks == [[token] for token in answer["output_ids"]] and len(masks) == NEW_TOKENS


def test_hidden_states_are_refused_as_on_a_server_that_does_not_keep_them(ours):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ours.generate(**{**base_requests()[0], "return_hidden_states": True})
    assert refused.value.code == 400
    assert "not configured to return hidden states" in refused.value.read().decode()
