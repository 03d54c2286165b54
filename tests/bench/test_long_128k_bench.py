"""bench.long_128k: the claims that it makes of its figures."""

from __future__ import annotations

from bench.long_128k import claims_of


def of_server(step_ms: list[float], answers: int = 4) -> dict[str, object]:
    return {"step_ms": step_ms, "answers": answers}


def test_claims_are_of_medians_and_of_answers_that_came_whole():
    figures = {
        "32000": {"window": of_server([5.0, 9.0, 5.1]), "no window": of_server([5.2, 5.0, 5.1])},
        "130000": {"window": of_server([5.5, 5.5, 5.5], answers=3), "no window": of_server([5.0, 5.0, 5.0])},
    }
    accepted = {
        "none@128": {"131072": {"new_tokens_after_the_first_per_step": 1.1}},
        "1024": {"131072": {"new_tokens_after_the_first_per_step": 1.0}},  # without YaRN nothing is claimed
    }
    claims = [(one["what"], one["value"], one["ok"]) for one in claims_of(figures, accepted, rounds=3)]
    assert claims == [
        ("whole answers after 32000 tokens", 8, True),
        ("step time with a window over none after 32000 tokens", 1.0, True),
        ("whole answers after 130000 tokens", 7, False),
        ("step time with a window over none after 130000 tokens", 1.1, False),
        ("new tokens a step of the pair, none@128, 131072 tokens", 1.1, False),
    ]
