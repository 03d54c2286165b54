"""Targets whose sliding layers have a KV pool of their own: the draft's slots are the full layers' everywhere.

Output equality with such a target is `test_zoo.py`'s. Here the draft's own rows: a wrong one would change what is
proposed, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.soak import driver
from tests.support import scheduler_hooks
from tests.support.engines import greedy, serve
from tests.zoo import ZOO, pair

pytestmark = [pytest.mark.slow, pytest.mark.full]

GPT_OSS = "gpt-oss"  # a window of 24
NEW_TOKENS = 40


def proposals(directory: Path, **arguments: Any) -> tuple[list[list[int]], list[Any]]:
    """Outputs, and (prefix length, proposals) of every block, of prompts and the next turn of the last.

    Together they need the sliding layers' pool several times over: its slots part from the full layers'.
    """
    directory.mkdir()
    environment = scheduler_hooks.hooked(directory, "proposals")
    arguments |= dict(ZOO[GPT_OSS].arguments, chunked_prefill_size=64, max_total_tokens=4096)
    arguments["swa_full_tokens_ratio"] = 0.15
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(4, 250, (n,), generator=generator).tolist() for n in (33, 200, 150, 250, 90, 220)]
    with serve(*pair(GPT_OSS), environment=environment, disable_overlap_schedule=True, **arguments) as server:
        outputs = [greedy(server, [prompt], NEW_TOKENS)[0] for prompt in prompts]
        outputs += greedy(server, [prompts[-1] + outputs[-1] + [9, 8, 7]], NEW_TOKENS)
        hybrid = "SWAKVPool" in server.log_text()
    assert hybrid == ("disable_hybrid_swa_memory" not in arguments)
    return outputs, scheduler_hooks.noted(directory, "proposals.jsonl")


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return proposals(tmp_path_factory.mktemp("one") / "pool", disable_hybrid_swa_memory=True)


@pytest.mark.matrix(target="gpt-oss, hybrid pool", draft="z-lab", kv="model dtype", outcome="works")
def test_proposals_beside_a_hybrid_pool_are_those_beside_one_pool(one_pool, tmp_path):
    outputs, blocks = proposals(tmp_path / "hybrid", page_size=64)
    assert outputs == one_pool[0]
    assert blocks == one_pool[1]
    assert len(blocks) > 3 * NEW_TOKENS
    assert len({tuple(tokens) for _, tokens in blocks}) > 10


def test_outputs_longer_than_the_sliding_pool_end_without_retraction_and_leave_no_slot(tmp_path):
    """Of about 250 sliding slots: those behind a window are freed while a request decodes."""
    flags = dict(ZOO[GPT_OSS].arguments, chunked_prefill_size=64, max_total_tokens=4096)
    prompts, outputs = [[7, 8, 9], list(range(20, 80))], []
    for paths, more in ((pair(GPT_OSS)[:1], {}), (pair(GPT_OSS), dict(swa_full_tokens_ratio=0.06))):
        environment = {"SGLANG_SWA_EVICTION_INTERVAL": "1"}
        with serve(*paths, environment=environment, **{**flags, **more}) as server:
            outputs.append([greedy(server, [prompt], 500)[0] for prompt in prompts] + greedy(server, prompts, 300))
            server.post("/flush_cache?timeout=60")
            assert driver.held_tokens(server.url) == 0
            log = server.log_text()
    assert outputs[0] == outputs[1]
    assert "SWAKVPool" in log and "KV cache pool is full. Retract requests" not in log
