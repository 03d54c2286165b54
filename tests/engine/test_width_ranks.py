"""Rank 0 decides one width of every step for all ranks, over gloo: those of tensor parallelism, and those of
data-parallel attention, which tell it their loads, IDLE ranks included. C16, C20 and C21 with the width policy on.

The width is drawn, so that nothing follows from the machine's times. What the policy makes of loads and times:
`tests/unit/width/test_policy.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.pair import held_out_prompts, pair_directories
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_parallel import ask, continuations
from tests.support import scheduler_hooks
from tests.support.collectives import Step, all_ended, recorded
from tests.support.engines import greedy_params, serve
from tests.support.rows import in_full_but

pytestmark = [pytest.mark.slow, pytest.mark.full]

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
RANKS, NEW_TOKENS = 2, 96
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor parallel": dict(),
    "data-parallel attention": dict(dp_size=RANKS, enable_dp_attention=True, enable_dp_lm_head=True),
    "data-parallel attention, head sharded over all ranks": dict(dp_size=RANKS, enable_dp_attention=True),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[900 * i : 900 * i + 20 + 31 * i]) for i in range(6)]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return continuations(TARGET, prompts, NEW_TOKENS)


@pytest.fixture(scope="module", params=in_full_but(LAYOUTS, release=["data-parallel attention"]))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> tuple[str, list[tuple[Step, ...]], list[dict[str, Any]]]:
    """The layout, [steps][ranks] and the answers to all prompts, of one request, then all together."""
    directory = tmp_path_factory.mktemp("steps")
    arguments = dict(tp_size=RANKS, mem_fraction_static=0.3, max_total_tokens=4096, watchdog_timeout=60)
    environment = recorded(directory, **{CONFIG_ENV: '{"width": {}}', scheduler_hooks.HOOKS_ENV: "widths"})
    with serve(TARGET, DRAFT, environment=environment, **arguments, **LAYOUTS[request.param]) as server:
        apart = "dp_size" in LAYOUTS[request.param]
        asked = []
        for number, prompt in enumerate(prompts):
            rank = dict(routed_dp_rank=int(number > 1)) if apart else {}
            asked.append(dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS), **rank))
        answers = [*ask(server, asked[-1:], together=True), *ask(server, asked, together=True)]
        return request.param, all_ended(directory, RANKS), answers


def decodes(served: Any) -> list[tuple[Step, ...]]:
    return [step for step in served[1] if any(of_rank.mode == "decode" for of_rank in step)]


def test_all_ranks_choose_one_width_for_every_step_and_not_always_the_same(served):
    widths = [{of_rank.width for of_rank in step} for step in decodes(served)]
    assert [number for number, of_step in enumerate(widths) if len(of_step) > 1] == []
    assert len(set.union(*widths)) >= 3
    if served[0] != "tensor parallel":
        assert any(of_rank.mode == "idle" for step in decodes(served) for of_rank in step)


def test_the_exchange_is_one_broadcast_a_step_and_one_gather_of_loads_that_differ(served):
    decisions = loads = 0
    for number, step in enumerate(decodes(served)):
        sequences = [
            [one.operation for one in of_rank.collectives if one.issuer == "worker" and "(cpu)" in one.group]
            for of_rank in step
        ]
        assert sequences[0] == sequences[1], f"step {number}"
        loads += sequences[0].count("allgather")
        decisions += sequences[0].count("broadcast")
    count = len(decodes(served))
    assert loads == (0 if served[0] == "tensor parallel" else count)
    assert decisions == count > 0


def test_output_equals_plain_decoding(served, plain):
    assert [answer["output_ids"] for answer in served[2]] == [plain[-1], *plain]
