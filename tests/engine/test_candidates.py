"""Candidates for trees, as a server drafts them, against the reference loop of the training package."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_sglang.drafting.row_reader import TREE_CANDIDATES
from dflash_sglang.pair import held_out_prompts, pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.engines import greedy_params, serve
from training.evaluate import load_pair
from training.shapes import Marginals, PairRequest, Shape, decode, greedy

NEW_TOKENS, BLOCK = 40, 16


class Noting(PairRequest):
    """Decodes as a chain, and keeps the likeliest tokens of every position."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.said: dict[int, Marginals] = {}

    def propose(self, last: int, candidates: int) -> Marginals:
        self.said[self.position] = found = super().propose(last, TREE_CANDIDATES)
        return Marginals(*(of[:, :candidates] for of in found))


@pytest.mark.parametrize("proposals", ["argmax", "drawn"])
def test_a_server_drafts_the_candidates_of_the_reference_in_graphs_that_are_padded_or_not(tmp_path, proposals):
    """One request, three in a graph of four, and five in a graph of eight, whose blocks have logprobs alone."""
    directories = pair_directories()
    prompts = [list(prompt.encode()[:150]) for prompt in held_out_prompts()[:9]]
    config = {CONFIG_ENV: json.dumps({"proposals": proposals, "width": "block"})}
    environment = recorded_graphs.recording(tmp_path, "candidates", **config)
    target, draft = (Path(directories[name]) for name in ("target", "draft"))
    with (
        serve(target, draft, environment=environment, max_running_requests=16) as server,
        ThreadPoolExecutor() as pool,
    ):
        for first, count in ((0, 1), (1, 3), (4, 5)):
            asked = dict(
                input_ids=prompts[first : first + count],
                rid=[str(first + i) for i in range(count)],
                sampling_params=[greedy_params(NEW_TOKENS)] * count,
            )
            pool.submit(server.generate, **asked).result()
    requests = [Noting(*load_pair()[:2], ids) for ids in prompts]
    decode(requests, Shape(BLOCK), NEW_TOKENS, [greedy] * len(prompts))

    seen: dict[int, int] = {}
    for rids, *rows, best in scheduler_hooks.noted(tmp_path, "candidates.jsonl"):
        if not all(rid.isdigit() for rid in rids):
            continue  # before the first request
        seen[len(rids)] = seen.get(len(rids), 0) + 1
        captured = min(size for size in recorded_graphs.SIZES if size >= len(rids))
        assert (best is not None) == (captured <= scheduler_hooks.TREE_REQUESTS)
        for i, (rid, prefix, tokens, logprobs) in enumerate(zip(rids, *rows, strict=True)):
            expected = requests[int(rid)].said.get(prefix)
            if expected is None:
                continue  # a step that was launched before the end of the request was known
            assert tokens[1:] == expected.tokens[:, 0].tolist()
            np.testing.assert_allclose(logprobs, expected.logp[:, 0], atol=1e-4)
            if best is not None:
                ids, of_ids = (np.array(of[i])[:, :TREE_CANDIDATES] for of in best)
                assert ids.tolist() == expected.tokens.tolist()
                np.testing.assert_allclose(of_ids, expected.logp, atol=1e-4)
    assert all(seen[count] > 3 for count in (1, 3, 5))
    drafted = {(one.captured, one.requests) for one in recorded_graphs.replays(tmp_path) if one.role == "draft"}
    assert {(1, 1), (4, 3), (8, 5)} <= drafted
