"""MiMo-V2's own multi-token-prediction layers as the draft: all read the target's hidden states.

Weights are random, so the layers choose the recorded continuation, with errors: steps commit 1 to 4 tokens.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_mtp import (
    COMMON,
    NEW_TOKENS,
    ask_each,
    commits_of,
    next_prompts,
    noted,
    ours,
    prompts,
    two_turns,
    wrong_proposals,
)
from tests.support.engines import greedy
from tests.zoo import mimo_v2
from tests.zoo.member import directory_of
from tests.zoo.mimo_v2 import Reference

pytestmark = [pytest.mark.slow, pytest.mark.full]

WIDTHS: dict[str, Any] = {"width": {"widths": [1, 2, 3, 4]}}


@functools.cache
def checkpoint() -> Path:
    return mimo_v2.write(directory_of("MiMo-V2 with MTP layers"))


@functools.cache
def both_turns() -> tuple[list[list[int]], list[list[int]]]:
    return two_turns(checkpoint(), prompts(), NEW_TOKENS, **COMMON)


@pytest.mark.matrix(target="MiMo-V2", draft="its own MTP layers", kv="model dtype, every width", outcome="works")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.release)])
def test_output_is_plain_decodings_and_proposals_are_the_references(ranks: int, tmp_path: Path) -> None:
    paths = dict(model_path=str(checkpoint()), speculative_draft_model_path=str(checkpoint()))
    arguments: dict[str, Any] = dict(tp_size=ranks, mem_fraction_static=0.3, **paths)
    reference = Reference(checkpoint())
    plain, plain_after_hits = both_turns()
    with ours(tmp_path, "mtp,widths,stretches", config=WIDTHS, **arguments) as (server, records):
        together = greedy(server, prompts(), NEW_TOKENS)
        after_hits = greedy(server, next_prompts(prompts(), plain), NEW_TOKENS)
        server.post("/flush_cache?timeout=60")
        answers, texts = ask_each(server, records, prompts(), plain)
        assert "draft: MTP(3 layers: sliding, sliding, sliding; the target's head)" in server.log_tail(2000)
    assert (together, after_hits) == (plain, plain_after_hits)
    assert [answer["output_ids"] for answer in answers] == plain
    blocks = noted(records)

    def propose(text: tuple[int, ...], chosen: tuple[int, ...]) -> list[int]:
        return reference.propose(torch.tensor(text), torch.tensor(chosen))

    assert wrong_proposals(blocks, texts, propose) == 0
    assert {len(block.chosen) + 1 for block in blocks} == {1, 2, 3, 4}
    commits = commits_of(blocks)
    assert commits >= {1, 2, 3, 4}, commits
