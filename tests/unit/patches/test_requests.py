"""What a request may hold when a scheduler gets it, where it stops, and what a session and an answer keep of it.

`test_bad_input.py` sends such requests to a server, and `test_sessions.py` turns.
"""

from __future__ import annotations

import inspect
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
    # fmt: off
    for message, fields in (
        ("input_ids=320: expected tokens of the vocabulary, 0 to 319", dict(input_ids=ids(5, VOCAB))),
        ("input_ids=-1: expected tokens of the vocabulary", dict(input_ids=ids(5, -1, 6))),
        (r"input_ids=\[\]: expected a prompt of one token at least", dict(input_ids=ids())),
        (f"stop_token_ids={2**70}: expected tokens", dict(stop_token_ids={3, 2**70}, min_new_tokens=1)),
        ("stop_token_ids=-7: expected tokens", dict(stop_token_ids={-7, 500}, min_new_tokens=1)),
        ("bootstrap_host=None: expected the prefill server of a boot", dict(bootstrap_room=7, role="decode")),
        (r"bootstrap_room=\[7\]: expected one value, since the request", dict(bootstrap_room=[7], role="decode")),
        (r"bootstrap_port=\[\]: expected one value", dict(bootstrap_port=[], bootstrap_room=7, role="prefill")),
        ("bootstrap_room=0: expected a number of 1", dict(bootstrap_room=0, bootstrap_host="host", role="decode")),
        ("bootstrap_room=-1: expected a number", dict(bootstrap_room=-1, bootstrap_host="host", role="prefill")),
        ("n=2: expected 1 with prefill and decode on different servers", dict(n=2, role="decode")),
        ("top_k=2147483648: expected at most 2147483647, or -1 for all tokens", dict(top_k=2**31)),
        (r"logit_bias of 7=nan: expected a number of at most 1e\+30", dict(logit_bias={"3": 0.5, "7": NAN})),
        ("logit_bias of 7=inf", dict(logit_bias={"7": INF})),
        ("min_p=0.1: expected 0 on a server with --enable-deterministic", dict(min_p=0.1, deterministic=True)),
        ("top_logprobs_num=321: expected at most 320", dict(return_logprob=True, top_logprobs_num=VOCAB + 1)),
        ("logprob_start_len=-2: expected -1", dict(return_logprob=True, logprob_start_len=-2)),
        ("positional_embed_overrides=0: expected none", dict(positional_embed_overrides=0)),
        (r"lora_id=\['a'\]: expected none", dict(lora_id=["a"])),
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
        (r"session_params id=\[1\]: expected a string, or none", dict(session_params=params(id=[1]))),
        ("session_params rid={}: expected a string, or none", dict(session_params=params(id="a", rid={}))),
        ("session_params offset=1.5: expected an integer, or none",
         dict(session_params=params(id="a", offset=1.5))),
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


class Turn(SimpleNamespace):
    """What SGLang's Req keeps of a session's turn."""

    def __init__(self, **fields: Any):
        super().__init__(**fields, finished_reason=None, to_finish=None, output_ids=array("q"))
        self.output_ids_through_stop = self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None

    def inherit_mm_token_counts(self, last: Turn) -> None:
        pass

    def set_finish_with_abort(self, message: str) -> None:
        self.to_finish = message

    multimodal_inputs = None


def session_of(streaming: bool) -> Any:
    from sglang.srt.session.session_controller import Session

    return Session(100, "a", streaming=streaming)


def ask(session: Any, tokens: list[int], **given: Any) -> Turn:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.session.session_controller import Session

    fields = dict.fromkeys(TokenizedGenerateReqInput.__struct_fields__)
    named = dict(rid=str(tokens), input_ids=ids(*tokens), session_params=params(id="a", **given))
    request = SimpleNamespace(**{**fields, **named})
    return sessions.create_req(Session.create_req, session, request, None, 320, req_factory=Turn)


def test_a_refused_turn_of_a_streaming_session_has_no_part_in_it():
    for given in ({}, dict(replace=True), dict(offset=1), dict(drop_previous_output=True)):
        session = session_of(streaming=True)
        running, refused = ask(session, [1, 2]), ask(session, [3], **given)
        assert running.session is session and running.to_finish is None
        assert refused.session is None and refused.to_finish is not None
        assert session._inflight


def test_a_turn_that_replaces_all_others_ends_those_that_run():
    session = session_of(streaming=False)
    first, second = ask(session, [1, 2]), ask(session, [3])
    first.finished_reason = "length"
    turn = ask(session, [4, 5], replace=True)
    assert list(turn.origin_input_ids) == [4, 5] and turn.to_finish is None
    assert first.to_finish is None and second.to_finish is not None
    assert [node.req for node in session.req_nodes.values()] == [turn]


def test_a_turn_follows_what_was_said_of_the_one_before():
    session = session_of(streaming=False)
    first = ask(session, [1, 2])
    first.finished_reason, first.sampling_params = "stop", SimpleNamespace(max_new_tokens=9)
    first.output_ids, first.output_ids_through_stop = ids(7, 8, 9), ids(7, 8)  # with an accepted run
    assert list(ask(session, [3], rid=first.rid).origin_input_ids) == [1, 2, 7, 8, 3]


def never(*_: Any) -> None:
    raise AssertionError("expected no call of SGLang's")


def test_a_retracted_turn_gives_its_slots_back_and_is_still_the_one_that_runs():
    session = session_of(streaming=True)
    turn = ask(session, [1, 2])
    slot = SimpleNamespace(lock="lock")
    kept = SimpleNamespace(slots={"a": slot}, borrowed_slot=lambda _: slot)
    turn.kv, turn.lock = SimpleNamespace(holds_mamba=False), None
    assert sessions.try_cache_finished_req(never, kept, turn) is False
    assert (kept.slots, turn.lock, slot.lock) == ({}, "lock", None)
    assert session._inflight and session.req_nodes == {}


# ---- What an answer tells of its proposals -------------------------------------------------------------------


@pytest.mark.parametrize(("verified", "accepted", "told"), [
    (0, 0, {"spec_num_proposed_drafts": 0}),
    (12, 3, {"spec_num_proposed_drafts": 12, "spec_accept_rate": 0.25}),
    (126, 63, {"spec_num_proposed_drafts": 126, "spec_accept_rate": 0.5}),  # copies beyond a block
])  # fmt: skip
def test_an_answer_counts_the_proposals_that_were_verified(
    verified: int, accepted: int, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers import tokenizer_manager

    from dflash_sglang.patches.results import of_an_answer

    monkeypatch.setattr(tokenizer_manager, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=16))
    answers = SimpleNamespace(
        spec_verify_ct=[0, 3], spec_num_correct_drafts=[0, accepted], spec_num_cap_tokens=[0, verified - 3 * 15],
        completion_tokens=[1, accepted + 4], spec_correct_drafts_histogram=[[], [3]],
    )  # fmt: skip
    original = inspect.unwrap(
        tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics
    )  # other tests apply the patches
    infos: list[dict[str, Any]] = [{}, {}]
    for i, info in enumerate(infos):
        of_an_answer(original, None, info, answers, i)
    shared = {
        "spec_verify_ct": 3, "spec_accept_length": (accepted + 4) / 3, "spec_num_correct_drafts": accepted,
        "spec_correct_drafts_histogram": [3],
    }  # fmt: skip
    assert infos == [{}, shared | told]
