"""What a request may hold when a scheduler gets it. `test_bad_input.py` sends such requests to a server."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.requests.errors import RequestError

VOCAB, WIDTH = 320, 3
ROW = [0.5, 1.5, -2.0]
SAMPLING: dict[str, Any] = dict(
    n=1, stop_token_ids=None, min_new_tokens=0, top_k=1 << 30, logit_bias=None, min_p=0.0
)


def answer(monkeypatch: pytest.MonkeyPatch, deterministic: bool = False, role: str = "null", **fields: Any) -> Any:
    """What SGLang would send to its scheduler; fields of the sampling parameters, and of the request. role: of
    --disaggregation-mode."""
    from dflash_sglang.patches import fatal_requests

    execution = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=deterministic))
    monkeypatch.setattr(fatal_requests, "get_exec", lambda: execution)
    monkeypatch.setattr(fatal_requests, "get_disagg", lambda: SimpleNamespace(disaggregation_mode=role))
    sampling = SimpleNamespace(**{name: fields.pop(name, default) for name, default in SAMPLING.items()})
    tokenized = SimpleNamespace(
        **dict(
            input_ids=array("q", [5]),
            input_embeds=None,
            mm_inputs=None,
            positional_embed_overrides=None,
            session_params=None,
            lora_id=None,
            lora_name=None,
            return_logprob=False,
            top_logprobs_num=0,
            logprob_start_len=-1,
            bootstrap_host=None,
            bootstrap_port=None,
            bootstrap_room=None,
        )
        | fields,
        sampling_params=sampling,
    )
    config = SimpleNamespace(vocab_size=VOCAB, hidden_size=WIDTH, dtype=torch.float16)
    manager = SimpleNamespace(model_config=config)
    obj = SimpleNamespace(sampling_params={})
    return fatal_requests.create_tokenized_object(lambda *_: tokenized, manager, obj, "text")


def params(**given: Any) -> Any:
    from sglang.srt.managers.io_struct import SessionParams

    return SessionParams(**given)


def placed(rows: list[list[float]]) -> Any:
    from sglang.srt.managers.embed_types import PositionalEmbeds

    return PositionalEmbeds(torch.tensor(rows), [0])


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(input_ids=array("q", [5, VOCAB])), "input_ids=320: expected tokens of the vocabulary, 0 to 319"),
        (dict(input_ids=array("q", [5, -1, 6])), "input_ids=-1: expected tokens of the vocabulary"),
        (dict(input_ids=array("q")), r"input_ids=\[\]: expected a prompt of one token at least"),
        (
            dict(stop_token_ids={3, 2**70}, min_new_tokens=1),
            "stop_token_ids=1180591620717411303424: expected tokens",
        ),
        (dict(stop_token_ids={-7, 500}, min_new_tokens=1), "stop_token_ids=-7: expected tokens"),
        (
            dict(bootstrap_room=7, role="decode"),
            "bootstrap_host=None: expected the prefill server of a bootstrap_room",
        ),
        (
            dict(bootstrap_room=[7], role="decode"),
            r"bootstrap_room=\[7\]: expected one value, since the request has",
        ),
        (dict(bootstrap_port=[], bootstrap_room=7, role="prefill"), r"bootstrap_port=\[\]: expected one value"),
        (dict(bootstrap_room=0, bootstrap_host="host", role="decode"), "bootstrap_room=0: expected a number of 1"),
        (dict(bootstrap_room=-1, bootstrap_host="host", role="prefill"), "bootstrap_room=-1: expected a number"),
        (dict(n=2, role="decode"), "n=2: expected 1 with prefill and decode on different servers"),
        (dict(top_k=2**31), "top_k=2147483648: expected at most 2147483647, or -1 for all tokens"),
        (
            dict(logit_bias={"3": 0.5, "7": float("nan")}),
            r"logit_bias of 7=nan: expected a number of at most 1e\+30",
        ),
        (dict(logit_bias={"7": float("inf")}), "logit_bias of 7=inf"),
        (dict(min_p=0.1, deterministic=True), "min_p=0.1: expected 0 on a server with --enable-deterministic"),
        (dict(return_logprob=True, top_logprobs_num=VOCAB + 1), "top_logprobs_num=321: expected at most 320"),
        (dict(return_logprob=True, logprob_start_len=-2), "logprob_start_len=-2: expected -1"),
        (dict(positional_embed_overrides=0), "positional_embed_overrides=0: expected none"),
        (dict(lora_id=["a"]), r"lora_id=\['a'\]: expected none"),
        (
            dict(input_embeds=[ROW[:2]]),
            r"input_embeds=\[\[0.5, 1.5\]\]: expected a row of 3 numbers for each token",
        ),
        *(
            (dict(input_embeds=rows), "input_embeds=.*: expected a row of 3 numbers for each token of the prompt")
            for rows in ([], [[]], ROW, [ROW, ROW[:2]], [[ROW]], [["a"] * 3], [[True] * 3], [[None] * 3], [2**70])
        ),
        (dict(input_embeds=[ROW, [0.5, float("nan"), 0.5]]), "input_embeds of token 1=nan: expected a number"),
        (dict(input_embeds=[[0.5, float("-inf"), 0.5]]), "input_embeds of token 0=-inf: expected a number"),
        (dict(input_embeds=[[0.5, 70000.0, 0.5]]), "of token 0=inf: expected a number that torch.float16 holds"),
        (dict(input_embeds=[ROW], session_params=params(id="a")), "input_embeds=.*: expected none in a session"),
        (dict(input_embeds=[ROW], positional_embed_overrides=placed([ROW])), "overrides=.*: expected none beside"),
        (
            dict(positional_embed_overrides=placed([ROW]), session_params=params(id="a")),
            "positional_embed_overrides=.*: expected none in a session",
        ),
        (dict(positional_embed_overrides=placed([ROW[:2]])), r"overrides of shape=\[1, 2\]: expected rows of 3"),
        (dict(positional_embed_overrides=placed([[float("nan")] * 3])), "overrides of token 0=nan: expected a"),
        (dict(session_params=params(id=[1])), r"session_params id=\[1\]: expected a string, or none"),
        (dict(session_params=params(id="a", rid={})), "session_params rid={}: expected a string, or none"),
        (
            dict(session_params=params(id="a", offset=1.5)),
            "session_params offset=1.5: expected an integer, or none",
        ),
    ],
)
def test_a_request_that_ends_the_scheduler_is_refused_with_what_was_expected(monkeypatch, fields, message):
    with pytest.raises(RequestError, match=message):
        answer(monkeypatch, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        dict(input_ids=array("q", [0, VOCAB - 1]), stop_token_ids={0, VOCAB - 1}, top_k=2**31 - 1),
        dict(input_ids=array("q"), session_params=params(id="a")),
        dict(input_ids=array("q", [VOCAB]), mm_inputs=SimpleNamespace()),
        dict(input_ids=None, input_embeds=[ROW, [0, 1, 2]]),
        dict(positional_embed_overrides=placed([ROW])),
        dict(session_params=params(id="a", rid="b", offset=-1)),
        dict(logit_bias={"3": float("-inf"), "4": 1e30, "5": -1e39}, min_p=0.1),
        dict(min_p=0.0, deterministic=True),
        dict(return_logprob=True, top_logprobs_num=VOCAB, logprob_start_len=0),
        dict(top_logprobs_num=2**40, logprob_start_len=-5),  # read with return_logprob alone
        dict(lora_id="0af3", lora_name="adapter"),
        dict(bootstrap_room=7, bootstrap_host="host", role="decode"),
        dict(bootstrap_room=7, role="prefill"),
        dict(bootstrap_room=0, bootstrap_host="2.2.2.2", role="decode"),  # SGLang's warm-up and health check
        dict(bootstrap_room=[7], bootstrap_host=[]),  # which one server does not read
        dict(role="decode"),  # SGLang refuses it
    ],
)
def test_a_request_that_can_be_served_passes(monkeypatch, fields):
    assert answer(monkeypatch, **fields)


def test_embeddings_reach_the_scheduler_at_the_positions_of_placeholders(monkeypatch):
    request = answer(monkeypatch, input_ids=None, input_embeds=[ROW, [0, 1, 2]])
    overrides = request.positional_embed_overrides
    assert request.input_embeds is None and list(request.input_ids) == [1, 1] and overrides.positions == [0, 1]
    assert overrides.embeds.dtype == torch.float16 and overrides.embeds.tolist() == [ROW, [0, 1, 2]]


def test_a_body_with_embeddings_of_no_token_is_refused():
    from dflash_sglang.patches.input_embeds import no_rows

    for rows in ([], [[]], [[], [0.5]]):
        assert no_rows(dict(input_embeds=rows)).startswith("input_embeds=[")
        assert no_rows(dict(input_embeds=rows, text="a")) is None  # which SGLang reads
    for body in ([1], "x", {}, dict(input_embeds=5), dict(input_embeds=[ROW])):
        assert no_rows(body) is None


def test_stop_tokens_outside_of_the_vocabulary_reach_no_scheduler(monkeypatch):
    """Clients name those of other models. A neighbour's min_new_tokens would look them up."""
    for asked, kept in (({-1, 3, VOCAB}, {3}), ({2**70}, None), (None, None)):
        assert answer(monkeypatch, stop_token_ids=asked).sampling_params.stop_token_ids == kept


def test_a_stop_regex_is_read_before_sglang_reads_it():
    from dflash_sglang.patches.fatal_requests import LONGEST_STOP_REGEX, _check_stop_regex

    for good in (None, "", "a+", ["a", r"\d\."], 5, {}, "(" * (LONGEST_STOP_REGEX + 1)):  # the others are SGLang's
        _check_stop_regex(good)
    for bad in ("(", ["a", "["], "x{99999999999}", "(?<=a+)b", "(" * LONGEST_STOP_REGEX):
        with pytest.raises(RequestError, match=r"^stop_regex='.*: expected a regular expression that Python's re"):
            _check_stop_regex(bad)
