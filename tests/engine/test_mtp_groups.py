"""Multi-token-prediction layers in two KV groups: one at the target's full slots, two at its sliding ones.

There are few sliding slots, and texts are several windows long: the slots of a request's early tokens are freed,
and taken again, while it decodes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.demo.server import Server
from tests.engine.test_mtp import ask_each, expected, next_prompts, noted, ours, two_turns, wrong_proposals
from tests.support import recorded_graphs
from tests.support.engines import greedy
from tests.zoo import step3p5
from tests.zoo.member import directory_of
from tests.zoo.step3p5 import FULL, LAYERS, SLIDING, TYPES, WINDOW

pytestmark = pytest.mark.slow

TYPES_OF_GROUPS = [*TYPES[:LAYERS], SLIDING, FULL, SLIDING]
NEW_TOKENS = 4 * WINDOW
LENGTHS = (5, 33, 200, 10 * WINDOW)
COMMON: dict[str, Any] = dict(chunked_prefill_size=64, max_total_tokens=2048, swa_full_tokens_ratio=0.25)
WIDTHS: dict[str, Any] = {"width": {"widths": [1, 2, 3, 4]}}


@functools.cache
def checkpoint() -> Path:
    return step3p5.write(directory_of("Step-3.5 in two KV groups"), TYPES_OF_GROUPS)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(4, 250, (n,), generator=generator).tolist() for n in LENGTHS]


@functools.cache
def both_turns() -> tuple[list[list[int]], list[list[int]]]:
    return two_turns(checkpoint(), prompts(), NEW_TOKENS, **COMMON)


@contextmanager
def drafting(directory: Path, hooks: str, **arguments: Any) -> Iterator[tuple[Server, Path]]:
    paths = dict(model_path=str(checkpoint()), speculative_draft_model_path=str(checkpoint()))
    with ours(directory, hooks, **{**COMMON, **paths, **arguments}) as started:
        yield started


@pytest.mark.matrix(
    target="Step-3.5", draft="its own MTP layers", kv="model dtype, two KV groups", outcome="works"
)
@pytest.mark.parametrize(("page_size", "graphs"), [pytest.param(1, False, marks=pytest.mark.release), (64, True)])
def test_every_block_is_the_references_while_sliding_slots_are_freed(
    page_size: int, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SWA_EVICTION_INTERVAL", "1")  # as soon as nobody reads them
    first, second = both_turns()
    settings: dict[str, Any] = dict(config=WIDTHS, page_size=page_size, graphs=graphs)
    with drafting(tmp_path, "mtp,freed,widths,stretches", **settings) as (server, records):
        log = server.log_text()
        assert "slots, sliding ones its sliding slots" in log
        assert "GB for 2048 tokens, 512 of sliding layers" in log
        together = greedy(server, prompts(), NEW_TOKENS)
        after_hits = greedy(server, next_prompts(prompts(), together), NEW_TOKENS)
        server.post("/flush_cache?timeout=60")
        answers, texts = ask_each(server, records, prompts(), first)
    assert (together, after_hits) == (first, second)
    assert [answer["output_ids"] for answer in answers] == first
    blocks = noted(records)
    assert not graphs or {replay.role for replay in recorded_graphs.replays(records)} == {"draft", "target"}
    assert len(blocks) > NEW_TOKENS
    assert {len(block.chosen) + 1 for block in blocks} == {1, 2, 3, 4}
    assert wrong_proposals(blocks, texts, functools.partial(expected, target=checkpoint())) == 0
