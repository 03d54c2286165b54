"""A request that stops inside an accepted run is as if its tokens had come one by one (C8)."""

from __future__ import annotations

from array import array
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


@pytest.mark.parametrize("stop", ["zz", "ge", "eg", "ej"])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("sizes", [[1, 3], [2, 2], [4]], ids=str)
def test_a_run_ends_where_its_grammar_does_or_with_the_first_stop_before(stop, ignore_eos, sizes):
    """Where EOS is ignored nothing but the grammar tells the end of a text without the stop string."""
    got, expected = (
        outcome(Grammar(request(stop=[stop], ignore_eos=ignore_eos)).run(of)) for of in (sizes, [1] * 4)
    )
    assert got == expected and got[0] == TOKENS[: 3 if stop == "ge" else 4]


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
