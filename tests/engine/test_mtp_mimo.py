"""MiMo-V2's own multi-token-prediction layers as the draft: all read the target's hidden states.

Weights are random, so the layers choose the recorded continuation, with errors: steps commit 1 to 4 tokens.
"""

from __future__ import annotations

import functools
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_mtp import COMMON, NEW_TOKENS, next_prompts, noted, ours, prompts
from tests.support import scheduler_hooks
from tests.support.engines import greedy, greedy_params, serve
from tests.zoo import mimo_v2
from tests.zoo.mimo_v2 import MTP_LAYERS, Reference

pytestmark = [pytest.mark.slow, pytest.mark.full]

WIDTHS: dict[str, Any] = {"width": {"widths": [1, 2, 3, 4]}}


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mimo")


@functools.cache
def checkpoint() -> Path:
    return mimo_v2.write(Path(_directory().name) / "target")


@functools.cache
def both_turns() -> tuple[list[list[int]], list[list[int]]]:
    """What a server without speculation answers, and what then to prompts that begin with these answers."""
    with serve(checkpoint(), **COMMON) as server:
        first = greedy(server, prompts(), NEW_TOKENS)
        return first, greedy(server, next_prompts(first), NEW_TOKENS)


@pytest.mark.matrix(target="MiMo-V2", draft="its own MTP layers", kv="model dtype, every width", outcome="works")
@pytest.mark.parametrize("ranks", [1, 2])
def test_output_is_plain_decodings_and_proposals_are_the_references(ranks: int, tmp_path: Path) -> None:
    paths = dict(model_path=str(checkpoint()), speculative_draft_model_path=str(checkpoint()))
    arguments: dict[str, Any] = dict(tp_size=ranks, mem_fraction_static=0.3, **paths)
    reference, texts = Reference(checkpoint()), {}
    plain, plain_after_hits = both_turns()
    with ours(tmp_path, "mtp,widths,stretches", config=WIDTHS, **arguments) as (server, records):
        together = greedy(server, prompts(), NEW_TOKENS)
        after_hits = greedy(server, next_prompts(plain), NEW_TOKENS)
        server.post("/flush_cache?timeout=60")
        for prompt, output in zip(prompts(), plain, strict=True):
            scheduler_hooks.record(records, prompt, output)
            rid = f"text {len(prompt)}"
            answer = server.generate(input_ids=prompt, rid=rid, sampling_params=greedy_params(NEW_TOKENS))
            assert answer["output_ids"] == output
            texts[rid] = prompt + output
        assert "draft: MTP(3 layers: sliding, sliding, sliding; the target's head)" in server.log_tail(2000)
    assert (together, after_hits) == (plain, plain_after_hits)
    blocks = noted(records)
    wrong = 0
    for block in blocks:
        text = texts[block.rid][: block.prefix + 1]
        if len(text) == block.prefix + 1:  # else the step began behind the request's end
            chosen = torch.tensor([*block.chosen, *[0] * (MTP_LAYERS - len(block.chosen))])
            wrong += block.likeliest != reference.propose(torch.tensor(text), chosen)[: len(block.likeliest)]
    assert wrong == 0
    assert {len(block.chosen) + 1 for block in blocks} == {1, 2, 3, 4}
    commits = {after.prefix - before.prefix for before, after in pairwise(blocks) if after.rid == before.rid}
    assert commits >= {1, 2, 3, 4}, commits
