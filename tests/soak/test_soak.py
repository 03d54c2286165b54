"""The soak on the CPU, float32, in a pool too small for it; and its checks notice what is wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.soak import checks, run
from tests.soak.driver import Outcome
from tests.soak.requests import Request
from tests.support.engines import serve
from training.pair import pair_directories

REQUESTS, CONCURRENCY, SEED = 1000, 24, 1
TIE = 1e-4  # of two logprobs; float32 rounds them by a third of that
# Checks of SGLang's own, after every step: all slots accounted for, none freed twice, none free that is in use.
CHECKED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "25"}
FLAGS = dict(skip_tokenizer_init=None, context_length=512)


@pytest.mark.slow
@pytest.mark.full
def test_a_soaked_server_answers_properly_as_plain_decoding_does_and_holds_nothing_afterwards() -> None:
    target, draft = (Path(pair_directories()[name]) for name in ("target", "draft"))
    with serve(
        target,
        draft,
        environment={"DFLASH_SGLANG_REQUIRE": "1", **CHECKED, **RETRACTING},
        **FLAGS,
        speculative_num_draft_tokens=8,  # half the work of 16 for the CPU
        chunked_prefill_size=256,
        max_total_tokens=1800,
    ) as server:
        ours = run.soak(server.url, REQUESTS, CONCURRENCY, SEED)
        # Before that line a server that skips its warm-up logs that nobody answers its /freeze_gc yet.
        log = server.log_text().partition("The server is fired up")[2]
        print(server.log_tail(60))  # shown with a failure
    figures = ours.figures()
    assert ours.problems() == {}
    assert len(ours.outcomes) == REQUESTS and len(ours.finished) >= 0.8 * REQUESTS
    assert all(figures["aborted"][way] >= 0.01 * REQUESTS for way in ("disconnect", "abort_request"))
    assert figures["finish_reasons"]["stop"] >= 0.05 * REQUESTS
    assert figures["tokens_per_verify_step"] >= 2
    assert (ours.held_before, ours.held_after, ours.alive) == (0, 0, True)
    assert "Testing retraction" in log
    assert "memory leak" not in log and "Mem Leak" not in log and "Traceback" not in log

    with serve(target, environment=CHECKED, **FLAGS, disable_overlap_schedule=True) as server:
        comparison = checks.compare(ours.greedy, run.plain_answers(server.url, ours.greedy, CONCURRENCY))
    assert comparison.compared >= 0.45 * REQUESTS
    assert [(one.what, one.gap, one.request.sampling) for one in comparison.defects(TIE)] == []
    assert len(comparison.divergences) <= 2
    assert comparison.logprob_error < 1e-3


# ---- The checks themselves -----------------------------------------------------------------------------------

REQUEST = Request(
    dict(
        rid="a",
        input_ids=[1, 2, 3],
        sampling_params=dict(temperature=0, max_new_tokens=4, stop_token_ids=[9], ignore_eos=False),
        stream=True,
        return_logprob=True,
        top_logprobs_num=1,
        logprob_start_len=1,
    )
)


def answer(ids: list[int], finish: dict[str, Any], **meta: Any) -> dict[str, Any]:
    top = [[[-0.5, token, None], [-1.5, token + 1, None]] for token in ids]
    meta = {
        "id": "a",
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "finish_reason": finish,
        "input_token_logprobs": [[None, 2, None], [-2.0, 3, None]],
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "output_top_logprobs": [row[:1] for row in top],
        **meta,
    }
    return {"text": "".join(map(chr, ids)), "output_ids": ids, "meta_info": meta}


LENGTH = {"type": "length", "length": 4}
EOS = 257


def stop(matched: int | str) -> dict[str, Any]:
    return {"type": "stop", "matched": matched}


STOPPED = answer([5, 9], stop(9))


def outcome(*answers: dict[str, Any], **sampling: Any) -> Outcome:
    request = copy.deepcopy(REQUEST)
    request.body["sampling_params"].update(sampling)
    return Outcome(request, 200, list(answers), [one["output_ids"] for one in answers])


def told(**meta: Any) -> Outcome:
    """A proper answer, but for these fields of its meta_info."""
    return outcome(answer([5, 9], stop(9), **meta))


# An outcome, and what its problem says; None where it has none.
OUTCOMES = [
    (outcome(answer([5, 6, 7, 8], LENGTH)), None),
    (outcome(STOPPED), None),
    (outcome(answer([5, EOS], stop(EOS))), None),
    (outcome(answer([88, EOS], stop("e")), stop=["e"], no_stop_trim=True), None),  # of <|eos|>
    (outcome(answer([5, 6, 7, 8, 5], LENGTH)), "at most 4"),
    (outcome(answer([5, 6], LENGTH)), "length after 2"),
    (outcome(answer([], stop(9))), "0 tokens"),
    (outcome(answer([5, 9, 5, 5], LENGTH)), "in the middle"),
    (outcome(answer([5, 6], stop(9))), "stopped at token 9"),
    (outcome(answer([5, 6], stop(6))), "stopped at token 6"),
    (outcome(answer([5, 6], stop("x"))), "stopped at 'x'"),
    (outcome(answer([88, 97], stop("a")), stop=["a"]), "stopped at 'a'"),
    (outcome(answer([88], stop("a")), stop=["a"], no_stop_trim=True), "stopped at 'a'"),
    (outcome(answer([88, 97], stop(9))), "stopped at token 9"),
    (outcome(STOPPED, min_new_tokens=3), "at least 3"),
    (outcome(answer([97, EOS], stop(EOS)), regex="b.*"), "obey the grammar"),
    (outcome(answer([5, 9], {"type": "abort", "message": "?"})), "finish_reason"),
    (told(completion_tokens=3), "completion_tokens 3"),
    (told(prompt_tokens=4), "prompt_tokens 4"),
    (told(id="b"), "answer of b"),
    (told(output_token_logprobs=[[-0.5, 5, None]]), "of other tokens"),
    (told(output_top_logprobs=[[], []]), "another size"),
    (told(input_token_logprobs=[]), "input_token_logprobs"),
    (outcome(STOPPED, STOPPED), "2 answers"),
    (Outcome(REQUEST, 200, [STOPPED], [[6], [5, 9]]), "took back"),
    (Outcome(REQUEST, 500, error="no"), "status 500: no"),
]


def test_a_wrong_answer_is_a_problem_and_a_proper_one_is_none():
    for number, (one, problem) in enumerate(OUTCOMES):
        found = " ".join(checks.problems(one, frozenset([EOS])))
        assert problem in found if problem else not found, (number, problem, found)


def test_a_divergence_is_a_tie_only_where_plains_two_best_tokens_are_close():
    plain = answer([5, 6, 7, 8], LENGTH)
    rows = plain["meta_info"]["output_top_logprobs"] = [[[-0.5, i, None], [-1.5, 0, None]] for i in [5, 6, 7, 8]]
    other = outcome(answer([5, 6, 1, 8], LENGTH))
    assert len(checks.compare([other], [outcome(plain)]).defects(tie=0.9)) == 1
    rows[2] = [[-0.5, 7, None], [-0.6, 1, None]]
    compared = checks.compare([other], [outcome(plain)])
    assert compared.defects(tie=0.2) == [] and len(compared.divergences) == 1
    assert len(compared.defects(tie=0.05)) == 1
    shorter = outcome(answer([5, 6], stop(6)))
    assert len(checks.compare([shorter], [outcome(plain)]).defects(tie=100)) == 1
    assert checks.compare([outcome(answer([5, 6, 7, 8], LENGTH))], [outcome(plain)]).divergences == []


def test_a_request_refused_with_its_abort_is_aborted_and_another_one_is_not():
    refusal = '{"error":{"message":"Aborted by AbortReq."}}'
    aborted = Request(REQUEST.body, "abort_request")
    assert Outcome(aborted, 400, error=refusal).aborted
    assert Outcome(aborted, error=f"ValueError: {refusal}").aborted
    assert not Outcome(REQUEST, 400, error=refusal).aborted
    assert not Outcome(aborted, 400, error="the prompt is too long").aborted
