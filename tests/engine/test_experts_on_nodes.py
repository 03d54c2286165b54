"""A target with experts under data-parallel attention, each rank behind a launcher of its own; gloo, float32.

The launchers stand for nodes. An oracle has steps accept anything from none to the whole block, on whichever rank
the request runs, while the other rank idles, prefills or decodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_parallel import RANKS, ask, continuations
from tests.engine.test_recurrent_serving import random_ids
from tests.support import scheduler_hooks
from tests.support.collectives import recorded, steps
from tests.support.engines import accepted_proposals, greedy_params, serve_on_nodes
from tests.zoo.member import BLOCK, pair

pytestmark = [pytest.mark.slow, pytest.mark.full]

LENGTHS = (1, 17, 64, 130)
NEW_TOKENS = 48
PLACES = ((3, 1), (2, 0), (0, 0), (1, 1), (2, 1), (3, 1))  # (prompt, rank); the first two alone


def activate() -> None:
    """Entry point in a launcher: the second one waits in vain for ports that the first one listens on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.wait_port_available", lambda *_, **__: True, HookType.REPLACE)


def test_both_nodes_output_what_plain_decoding_does_with_and_without_a_neighbours_requests(tmp_path: Path) -> None:
    """Requests to one rank while the other has none, and to both at once. An idle rank keeps the experts company
    and writes nothing."""
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    plain = continuations(pair("Qwen3-MoE")[0], prompts, NEW_TOKENS)
    for prompt, output in zip(prompts, plain, strict=True):
        scheduler_hooks.record(tmp_path, prompt, output)
    oracle = {scheduler_hooks.HOOKS_ENV: "oracle", scheduler_hooks.RECORDS_ENV: str(tmp_path)}
    environment = recorded(tmp_path, **oracle)
    scheduler_hooks.install(tmp_path, "support.collectives", "engine.test_experts_on_nodes")
    arguments = dict(tp_size=2, dp_size=2, enable_dp_attention=True, max_total_tokens=2048, **RANKS)
    asked = [
        dict(
            input_ids=prompts[number],
            routed_dp_rank=rank,
            sampling_params=greedy_params(NEW_TOKENS // (1 + number % 2)),
        )
        for number, rank in PLACES
    ]
    with serve_on_nodes(2, *pair("Qwen3-MoE"), environment=environment, **arguments) as (first, _):
        answers = ask(first, asked[:2], together=False) + ask(first, asked[2:], together=True)
    for (number, rank), answer in zip(PLACES, answers, strict=True):
        ids = answer["output_ids"]
        assert answer["meta_info"]["dp_rank"] == rank
        assert ids == plain[number][: NEW_TOKENS // (1 + number % 2)], f"prompt {number}"
    for rank in (0, 1):
        of_rank = [answer for answer in answers if answer["meta_info"]["dp_rank"] == rank]
        assert all(answer["meta_info"]["spec_accept_length"] > 1.5 for answer in of_rank)
        assert len(accepted := accepted_proposals(of_rank)) >= BLOCK // 2, f"rank {rank}: {accepted}"
    of_ranks = list(zip(*(steps(tmp_path, rank) for rank in (0, 1)), strict=False))
    modes = {tuple(step.mode for step in of_both) for of_both in of_ranks}
    assert modes >= {("idle", "decode"), ("decode", "idle"), ("decode", "decode")}
    assert [step.changed for of_both in of_ranks for step in of_both if step.changed] == []
    for of_both in of_ranks:
        target = [[one for one in step.collectives if one.issuer == "target"] for step in of_both]
        assert target[0] == target[1] and target[0]
