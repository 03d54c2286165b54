"""A target with experts under data-parallel attention, each rank behind a launcher of its own; gloo, float32.

The launchers stand for nodes. An oracle has steps accept anything from none to the whole block, on whichever rank
the request runs, while the other rank idles, prefills or decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
Answers = list[tuple[int, dict[str, Any]]]  # with the numbers of their prompts


@dataclass
class Served:
    answers: Answers
    directory: Path


def activate() -> None:
    """Entry point in a launcher: the second one waits in vain for ports that the first one listens on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.wait_port_available", lambda *_, **__: True, HookType.REPLACE)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_ids(length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    target, _ = pair("Qwen3-MoE")
    return continuations(target, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def served(prompts: list[list[int]], plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Requests to one rank while the other has none, and to both at once, as many as the lengths say."""
    directory = tmp_path_factory.mktemp("ranks")
    for prompt, output in zip(prompts, plain, strict=True):
        scheduler_hooks.record(directory, prompt, output)
    oracle = {scheduler_hooks.HOOKS_ENV: "oracle", scheduler_hooks.RECORDS_ENV: str(directory)}
    environment = recorded(directory, **oracle)
    scheduler_hooks.install(directory, "support.collectives", "engine.test_experts_on_nodes")
    arguments = dict(tp_size=2, dp_size=2, enable_dp_attention=True, max_total_tokens=2048, **RANKS)
    with serve_on_nodes(2, *pair("Qwen3-MoE"), environment=environment, **arguments) as nodes:

        def answered(*places: tuple[int, int]) -> Answers:
            """places: (prompt, rank), all at once."""
            asked = [
                dict(
                    input_ids=prompts[number],
                    routed_dp_rank=rank,
                    sampling_params=greedy_params(NEW_TOKENS // (1 + number % 2)),
                )
                for number, rank in places
            ]
            answers = ask(nodes[0], asked, together=True)
            return [(number, answer) for (number, _), answer in zip(places, answers, strict=True)]

        one_by_one = answered((3, 1)) + answered((2, 0))
        return Served(one_by_one + answered((0, 0), (1, 1), (2, 1), (3, 1)), directory)


def test_both_nodes_output_what_plain_decoding_does_with_and_without_a_neighbours_requests(served, plain):
    assert [answer["meta_info"]["dp_rank"] for _, answer in served.answers] == [1, 0, 0, 1, 1, 1]
    for number, answer in served.answers:
        ids = answer["output_ids"]
        assert ids == plain[number][: NEW_TOKENS // (1 + number % 2)], f"prompt {number}"


def test_blocks_are_accepted_on_both_nodes(served):
    for rank in (0, 1):
        answers = [answer for _, answer in served.answers if answer["meta_info"]["dp_rank"] == rank]
        assert all(answer["meta_info"]["spec_accept_length"] > 1.5 for answer in answers)
        assert len(accepted := accepted_proposals(answers)) >= BLOCK // 2, f"rank {rank}: {accepted}"


def test_an_idle_rank_keeps_the_experts_company_and_writes_nothing(served):
    of_ranks = list(zip(*(steps(served.directory, rank) for rank in (0, 1)), strict=False))
    modes = {tuple(step.mode for step in of_both) for of_both in of_ranks}
    assert modes >= {("idle", "decode"), ("decode", "idle"), ("decode", "decode")}
    assert [step.changed for of_both in of_ranks for step in of_both if step.changed] == []
    for of_both in of_ranks:
        target = [[one for one in step.collectives if one.issuer == "target"] for step in of_both]
        assert target[0] == target[1] and target[0]
