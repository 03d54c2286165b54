"""A request that stops inside an accepted run is as if its tokens had come one by one (C8)."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

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


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
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


def outcome(req: Any) -> tuple[Any, ...]:
    return list(req.output_ids_through_stop), req.finished_reason.to_json(), req.reasoning_tokens


SAMPLINGS: dict[str, dict[str, Any]] = {
    "EOS": {},
    "stop token": {"stop_token_ids": [4]},
    "length": {"max_new_tokens": 2},
    "stop string before EOS": {"stop": ["ge"]},
    "stop string after EOS": {"stop": ["ii"]},
    "length before EOS": {"max_new_tokens": 3, "stop": ["j"]},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("sizes", [[1, 7], [2, 6], [3, 4, 1], [4, 4], [8]], ids=str)
def test_what_is_reported_ends_with_the_first_stop(sampling: dict[str, Any], sizes: list[int]) -> None:
    """Tokens that were thought, too: SGLang counts them with the whole run."""
    assert outcome(run(request(**sampling), sizes)) == outcome(run(request(**sampling), [1] * len(TOKENS)))


@pytest.mark.parametrize("sizes", [[1] * 8, [1, 7], [2, 6], [8]], ids=str)
@pytest.mark.parametrize("drops", [False, True])
def test_the_next_turn_of_a_session_goes_on_from_the_stop(sizes: list[int], drops: bool) -> None:
    from sglang.srt.session.session_controller import Session

    from dflash_sglang.patches.sessions import concat_token_arrays

    params = SimpleNamespace(drop_previous_output=drops, offset=None)
    turn = SimpleNamespace(input_ids=array("q", [11, 12]))
    ids, unpadded = concat_token_arrays(Session._concat_token_arrays, run(request(), sizes), turn, params)
    answer = [] if drops else [5, 6, 4, END]
    assert list(ids) == list(unpadded) == [*PROMPT, *answer, 11, 12]


def test_the_session_hook_is_on_a_function_of_sglang_that_has_these_arguments() -> None:
    import inspect

    from sglang.srt.session.session_controller import Session

    assert list(inspect.signature(Session._concat_token_arrays).parameters) == [
        "last_req", "req", "session_params",
    ]  # fmt: skip
    assert isinstance(vars(Session)["_concat_token_arrays"], staticmethod), "SGLang's registry hooks it as one"
