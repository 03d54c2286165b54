"""What an answer tells of its proposals."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from dflash_sglang.patches.results import of_an_answer


@pytest.mark.parametrize(("verified", "accepted", "told"), [
    (0, 0, {"spec_num_proposed_drafts": 0}),
    (12, 3, {"spec_num_proposed_drafts": 12, "spec_accept_rate": 0.25}),
    (126, 63, {"spec_num_proposed_drafts": 126, "spec_accept_rate": 0.5}),  # copies beyond a block
])  # fmt: skip
def test_an_answer_counts_the_proposals_that_were_verified(
    verified: int, accepted: int, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_manager, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=16))
    answers = SimpleNamespace(
        spec_verify_ct=[0, 3], spec_num_correct_drafts=[0, accepted], spec_num_cap_tokens=[0, verified - 3 * 15],
        completion_tokens=[1, accepted + 4], spec_correct_drafts_histogram=[[], [3]],
    )  # fmt: skip
    original = inspect.unwrap(TokenizerManager._calculate_spec_decoding_metrics)  # other tests apply the patches
    infos: list[dict[str, Any]] = [{}, {}]
    for i, info in enumerate(infos):
        of_an_answer(original, None, info, answers, i)
    shared = {
        "spec_verify_ct": 3, "spec_accept_length": (accepted + 4) / 3, "spec_num_correct_drafts": accepted,
        "spec_correct_drafts_histogram": [3],
    }  # fmt: skip
    assert infos == [{}, shared | told]
