"""Which batches need whole blocks, and which drafts have no candidates for trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.drafting.proposer import Proposer, why_no_candidates
from dflash_sglang.verify.verifier import Verifier


@pytest.mark.parametrize(
    "what", [None, "sampled", "penalised", "masked", "grammar", "logprobs", "bias", "processor", "sanitised"]
)
def test_what_is_adjusted_has_no_trees_and_what_is_reported_or_processed_by_the_host_no_ragged_steps_either(
    what: str | None,
) -> None:
    info = SimpleNamespace(
        is_all_greedy=what != "sampled",
        acc_additive_penalties=torch.zeros(1) if what == "penalised" else None,
        sampling_mask_batch_indices=[0] if what == "masked" else None,
        logit_bias=torch.zeros(1) if what == "bias" else None,
        has_custom_logit_processor=what == "processor",
    )
    batch = SimpleNamespace(sampling_info=info, has_grammar=what == "grammar", return_logprob=what == "logprobs")
    verifier = object.__new__(Verifier)
    verifier._sanitizes = what == "sanitised"
    batch.spec_info = SimpleNamespace(no_trees=None)
    ragged = {"masked": "reported", "logprobs": "reported", "processor": "adjusted"}.get(what)
    trees = None if what in (None, "sampled") else ragged or "adjusted"
    assert verifier.excluded(batch) == (ragged, trees, "sampled" if what == "sampled" else trees)
    if what is None:
        batch.spec_info.no_trees = "pool_full"
        assert verifier.excluded(batch) == (None, "pool_full", None)


def test_a_draft_without_candidates_is_not_asked_for_them() -> None:
    def drafts(edges: object = None, all_rows: object = None, anchor_proposes: bool = False) -> Any:
        spec = SimpleNamespace(anchor_proposes=anchor_proposes)
        return SimpleNamespace(edges=edges, head=SimpleNamespace(all_rows=all_rows), spec=spec)

    for model, reason in (
        (drafts(edges=object()), "the draft's edges score walks"),
        (drafts(all_rows=object()), "share the draft's head"),
        (drafts(anchor_proposes=True), "the anchor's row proposes"),
    ):
        assert reason in str(why_no_candidates(model))
        with pytest.raises(ValueError, match=f"tree_requests=4: expected 0, because .*{reason}"):
            Proposer(SimpleNamespace(), model, 8, None, drawn=False, tree_requests=4)
    assert why_no_candidates(drafts()) is None
