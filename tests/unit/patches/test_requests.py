"""What a request may hold when a scheduler gets it, where it stops, and what a session and an answer keep of it.

`test_bad_input.py` sends such requests to a server, and `test_sessions.py` turns.
"""

from __future__ import annotations

import itertools
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.patches import sessions
from dflash_sglang.requests.errors import RequestError

VOCAB, WIDTH = 320, 3
ROW = [0.5, 1.5, -2.0]
NAN, INF = float("nan"), float("inf")
SAMPLING: dict[str, Any] = dict(
    n=1, stop_token_ids=None, min_new_tokens=0, top_k=1 << 30, logit_bias=None, min_p=0.0
)
UNSET = ("input_embeds", "mm_inputs", "positional_embed_overrides", "session_params", "lora_id", "lora_name",
         "bootstrap_host", "bootstrap_port", "bootstrap_room")  # fmt: skip


def answer(monkeypatch: pytest.MonkeyPatch, deterministic: bool = False, role: str = "null", **fields: Any) -> Any:
    """What SGLang would send to its scheduler; fields of the sampling parameters, and of the request. role: of
    --disaggregation-mode."""
    from dflash_sglang.patches import fatal_requests

    execution = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=deterministic))
    monkeypatch.setattr(fatal_requests, "get_exec", lambda: execution)
    monkeypatch.setattr(fatal_requests, "get_disagg", lambda: SimpleNamespace(disaggregation_mode=role))
    sampling = SimpleNamespace(**{name: fields.pop(name, default) for name, default in SAMPLING.items()})
    given = dict(input_ids=array("q", [5]), return_logprob=False, top_logprobs_num=0, logprob_start_len=-1)
    tokenized = SimpleNamespace(**dict.fromkeys(UNSET) | given | fields, sampling_params=sampling)
    config = SimpleNamespace(vocab_size=VOCAB, hidden_size=WIDTH, dtype=torch.float16)
    manager, obj = SimpleNamespace(model_config=config), SimpleNamespace(sampling_params={})
    return fatal_requests.create_tokenized_object(lambda *_: tokenized, manager, obj, "text")


def ids(*tokens: int) -> array[int]:
    return array("q", tokens)


def params(**given: Any) -> Any:
    from sglang.srt.managers.io_struct import SessionParams

    return SessionParams(**given)


def placed(rows: list[list[float]]) -> Any:
    from sglang.srt.managers.embed_types import PositionalEmbeds

    return PositionalEmbeds(torch.tensor(rows), [0])


def test_a_request_that_ends_the_scheduler_is_refused_with_what_was_expected(monkeypatch):
    """`test_bad_input` and `test_disaggregated` send more."""
    # fmt: off
    for message, fields in (
        ("input_ids=320: expected tokens of the vocabulary, 0 to 319", dict(input_ids=ids(5, VOCAB))),
        (f"stop_token_ids={2**70}: expected tokens", dict(stop_token_ids={3, 2**70}, min_new_tokens=1)),
        ("stop_token_ids=-7: expected tokens", dict(stop_token_ids={-7, 500}, min_new_tokens=1)),
        ("bootstrap_host=None: expected the prefill server of a boot", dict(bootstrap_room=7, role="decode")),
        (r"bootstrap_room=\[7\]: expected one value, since the request", dict(bootstrap_room=[7], role="decode")),
        ("bootstrap_room=0: expected a number of 1", dict(bootstrap_room=0, bootstrap_host="host", role="decode")),
        ("bootstrap_room=-1: expected a number", dict(bootstrap_room=-1, bootstrap_host="host", role="prefill")),
        (r"logit_bias of 7=nan: expected a number of at most 1e\+30", dict(logit_bias={"3": 0.5, "7": NAN})),
        ("logit_bias of 7=inf", dict(logit_bias={"7": INF})),
        ("min_p=0.1: expected 0 on a server with --enable-deterministic", dict(min_p=0.1, deterministic=True)),
        (r"input_embeds=\[\[0.5, 1.5\]\]: expected a row of 3 numbers for each", dict(input_embeds=[ROW[:2]])),
        *(("input_embeds=.*: expected a row of 3 numbers for each token of the prompt", dict(input_embeds=rows))
          for rows in ([], [[]], ROW, [ROW, ROW[:2]], [[ROW]], [["a"] * 3], [[True] * 3], [[None] * 3], [2**70])),
        ("input_embeds of token 1=nan: expected a number", dict(input_embeds=[ROW, [0.5, NAN, 0.5]])),
        ("input_embeds of token 0=-inf: expected a number", dict(input_embeds=[[0.5, -INF, 0.5]])),
        ("of token 0=inf: expected a number that torch.float16 holds", dict(input_embeds=[[0.5, 70000.0, 0.5]])),
        ("input_embeds=.*: expected none in a session", dict(input_embeds=[ROW], session_params=params(id="a"))),
        ("overrides=.*: expected none beside",
         dict(input_embeds=[ROW], positional_embed_overrides=placed([ROW]))),
        ("positional_embed_overrides=.*: expected none in a session",
         dict(positional_embed_overrides=placed([ROW]), session_params=params(id="a"))),
        (r"overrides of shape=\[1, 2\]: expected rows of 3", dict(positional_embed_overrides=placed([ROW[:2]]))),
        ("overrides of token 0=nan: expected a", dict(positional_embed_overrides=placed([[NAN] * 3]))),
    ):
        # fmt: on
        with pytest.raises(RequestError, match=message):
            pytest.fail(f"{message}: answered: {answer(monkeypatch, **fields)}")


def test_a_request_that_can_be_served_passes(monkeypatch):
    for fields in (
        dict(input_ids=ids(0, VOCAB - 1), stop_token_ids={0, VOCAB - 1}, top_k=2**31 - 1),
        dict(input_ids=ids(), session_params=params(id="a")),
        dict(input_ids=ids(VOCAB), mm_inputs=SimpleNamespace()),
        dict(input_ids=None, input_embeds=[ROW, [0, 1, 2]]),
        dict(positional_embed_overrides=placed([ROW])),
        dict(session_params=params(id="a", rid="b", offset=-1)),
        dict(logit_bias={"3": -INF, "4": 1e30, "5": -1e39}, min_p=0.1),
        dict(min_p=0.0, deterministic=True),
        dict(return_logprob=True, top_logprobs_num=VOCAB, logprob_start_len=0),
        dict(top_logprobs_num=2**40, logprob_start_len=-5),  # read with return_logprob alone
        dict(lora_id="0af3", lora_name="adapter"),
        dict(bootstrap_room=7, bootstrap_host="host", role="decode"),
        dict(bootstrap_room=7, role="prefill"),
        dict(bootstrap_room=0, bootstrap_host="2.2.2.2", role="decode"),  # SGLang's warm-up and health check
        dict(bootstrap_room=[7], bootstrap_host=[]),  # which one server does not read
        dict(role="decode"),  # SGLang refuses it
    ):
        assert answer(monkeypatch, **fields), fields


def test_stop_tokens_outside_of_the_vocabulary_reach_no_scheduler(monkeypatch):
    """Clients name those of other models. A neighbour's min_new_tokens would look them up."""
    for asked, kept in (({-1, 3, VOCAB}, {3}), ({2**70}, None), (None, None)):
        assert answer(monkeypatch, stop_token_ids=asked).sampling_params.stop_token_ids == kept


# ---- Stops: a request is as if the tokens of an accepted run had come one by one ------------------------------


END, THINKS = 9, 77
PROMPT = [1, 2, 3]
TOKENS = [5, 6, 4, END, 8, 8, 8, 8]


class Tokenizer:
    """A token is a letter."""

    eos_token_id, additional_stop_token_ids = 0, None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture
def stops_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.schedule_batch import Req

    from dflash_sglang.patches import stops

    hook, original = stops.update_finish_state, Req.update_finish_state
    monkeypatch.setattr(Req, "update_finish_state", lambda req, *args: hook(original, req, *args))


def request(**sampling: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"max_new_tokens": 64, "temperature": 0, **sampling})
    params.normalize(Tokenizer())
    req = Req("r", "", array("q", PROMPT), params, vocab_size=1000, eos_token_ids={END}, require_reasoning=True)
    req.tokenizer = Tokenizer()
    return req


def run(req: Any, sizes: list[int]) -> Any:
    """As SGLang's result processor commits runs of these lengths, until the request ends."""
    tokens = iter(TOKENS)
    for size in sizes:
        committed = [next(tokens) for _ in range(size)]
        req.output_ids.extend(committed)
        req.update_reasoning_tokens(committed, [THINKS])
        req.update_finish_state(size)
        if req.finished():
            break
    return req


class Grammar:
    """Has taken all tokens that were committed; its text is TOKENS[:4]."""

    def __init__(self, req: Any) -> None:
        self._req, req.grammar = req, self

    def is_terminated(self) -> bool:
        return self.taken >= 4

    def run(self, sizes: list[int]) -> Any:
        for size in sizes:
            self._req.output_ids.extend(TOKENS[len(self._req.output_ids) :][:size])
            self.taken = len(self._req.output_ids)
            self._req.update_finish_state(size)
            if self._req.finished():
                break
        return self._req


def outcome(req: Any) -> tuple[Any, ...]:
    return list(req.output_ids_through_stop), req.finished_reason.to_json(), req.reasoning_tokens


def test_a_run_ends_where_its_grammar_does_or_with_the_first_stop_before(stops_installed):
    """Where EOS is ignored nothing but the grammar tells the end of a text without the stop string."""
    for case in itertools.product(("zz", "ge", "eg", "ej"), (False, True), ([1, 3], [2, 2], [4])):
        stop, ignore_eos, sizes = case
        got, expected = (
            outcome(Grammar(request(stop=[stop], ignore_eos=ignore_eos)).run(of)) for of in (sizes, [1] * 4)
        )
        assert got == expected and got[0] == TOKENS[: 3 if stop == "ge" else 4], case


def test_what_is_reported_ends_with_the_first_stop(stops_installed) -> None:
    """Tokens that were thought, too: SGLang counts them with the whole run."""
    for sampling in (
        dict(),  # EOS
        dict(stop_token_ids=[4]),
        dict(max_new_tokens=2),
        dict(stop=["ge"]),  # before EOS
        dict(stop=["ii"]),  # after it
        dict(max_new_tokens=3, stop=["j"]),  # length before EOS
    ):
        expected = outcome(run(request(**sampling), [1] * len(TOKENS)))
        for sizes in ([1, 7], [2, 6], [3, 4, 1], [4, 4], [8]):
            assert outcome(run(request(**sampling), sizes)) == expected, (sampling, sizes)


# ---- What a session keeps of a turn ---------------------------------------------------------------------------


def test_a_retracted_turn_gives_its_slots_back_and_is_still_the_one_that_runs():
    def never(*_: Any) -> None:
        raise AssertionError("expected no call of SGLang's")

    slot = SimpleNamespace(lock="lock")
    kept = SimpleNamespace(slots={"a": slot}, borrowed_slot=lambda _: slot)
    turn = SimpleNamespace(
        session=SimpleNamespace(session_id="a", finish_req=never),
        kv=SimpleNamespace(holds_mamba=False),
        lock=None,
        finished=lambda: False,
        finished_reason=None,
    )
    assert sessions.try_cache_finished_req(never, kept, turn) is False
    assert (kept.slots, turn.lock, slot.lock) == ({}, "lock", None)
