"""Data-parallel attention over gated delta nets, two gloo ranks on CPUs: output equals the same layout's without
speculation, while every step has another width.

Padding steps through recurrent states: on an idle rank it stands for the blocks of the other one. `sentinels` ends
the server where a step writes a state that belongs to no request of its batch, or padding's is no longer finite.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_parallel import ask
from tests.engine.test_recurrent_serving import (
    GRID,
    NEW_TOKENS,
    TARGET,
    WIDTHS,
    Answered,
    assert_equal,
    assert_every_number_was_accepted,
    next_turns,
    random_ids,
    request,
)
from tests.engine.test_recurrent_serving import recorded as oracle_of
from tests.support import scheduler_hooks
from tests.support.collectives import Step, all_ended, recorded
from tests.support.engines import serve
from tests.zoo.member import pair

pytestmark = [pytest.mark.slow, pytest.mark.full]

RANKS = 2
LAYOUT: dict[str, Any] = dict(
    tp_size=RANKS,
    dp_size=RANKS,
    enable_dp_attention=True,
    enable_dp_lm_head=True,
    chunked_prefill_size=GRID * RANKS,  # of which each rank has its share
    mem_fraction_static=0.3,
    max_total_tokens=4096,
    max_mamba_cache_size=64,
    watchdog_timeout=60,
)
FIRST = ((65, 0), (1, 1), (7, 1), (130, 1), (300, 1))  # tokens of the prompt, rank


def first_turns() -> list[dict[str, Any]]:
    return [dict(request(random_ids(length, seed=length)), routed_dp_rank=rank) for length, rank in FIRST]


def answered(server: Server, asked: list[dict[str, Any]]) -> list[Answered]:
    outputs = [answer["output_ids"] for answer in ask(server, asked, together=True)]
    return list(zip(asked, outputs, strict=True))


def on_their_ranks(first: list[Answered]) -> list[dict[str, Any]]:
    """`next_turns`, two of each first turn, where the prefix cache has it."""
    ranks = [asked["routed_dp_rank"] for asked, _ in first for _ in range(2)]
    return [dict(asked, routed_dp_rank=rank) for asked, rank in zip(next_turns(first), ranks, strict=True)]


@pytest.mark.matrix(target="Qwen3.5, data-parallel attention", draft="z-lab", kv="model dtype", outcome="works")
def test_output_equals_the_layouts_without_speculation_and_all_ranks_have_one_width_in_every_step(tmp_path):
    """Beside idle ranks, and beside ranks whose request waits while another one prefills."""
    with serve(pair(TARGET)[0], disable_radix_cache=True, **LAYOUT) as server:
        first = answered(server, first_turns())
        following = answered(server, on_their_ranks(first))
    (tmp_path / "records").mkdir()
    environment = recorded(
        tmp_path,
        **{
            CONFIG_ENV: json.dumps({"width": {"widths": WIDTHS}}),
            scheduler_hooks.HOOKS_ENV: "oracle,widths,sentinels",
            scheduler_hooks.RECORDS_ENV: str(oracle_of(tmp_path / "records", first + following)),
        },
    )
    alone, *others = first_turns()
    with serve(*pair(TARGET), environment=environment, mamba_track_interval=GRID, **LAYOUT) as server:
        answers = ask(server, [alone], together=True)
        server.post("/flush_cache?timeout=60")
        beside = server.stream(**alone)
        next(beside)  # it decodes by now, and the other rank begins to prefill
        of_others = ask(server, others, together=True)
        answers += [list(beside)[-1], *of_others]
        warm = ask(server, [asked for asked, _ in following], together=True)
        steps = all_ended(tmp_path, RANKS)
    assert_equal(answers, [first[0], *first])
    assert_equal(warm, following)
    assert_every_number_was_accepted(answers + warm)
    assert [answer["meta_info"]["dp_rank"] for answer in answers] == [0, *(rank for _, rank in FIRST)]
    for (length, _), answer in zip(FIRST, warm[::2], strict=True):  # they go on from states that verify wrote
        assert answer["meta_info"]["cached_tokens"] >= (length + NEW_TOKENS - 1) // GRID * GRID
    decodes = [step for step in steps if any(of_rank.mode == "decode" for of_rank in step)]
    widths = [{of_rank.width for of_rank in step} for step in decodes]
    assert [number for number, of_step in enumerate(widths) if len(of_step) > 1] == []
    assert set.union(*widths) == set(WIDTHS)
    loads = {tuple(of_rank.requests for of_rank in step) for step in decodes}
    assert any(few == 0 < many for few, many in loads) and any(many == 0 < few for few, many in loads)
    assert any(0 < few < many for few, many in loads)
    assert held_back([step[0] for step in steps]) > 0


def held_back(steps: list[Step]) -> int:
    """Steps in which a rank kept prefills company while it had a request: it decodes before, and goes on after."""
    count = waiting = 0
    decoded = False
    for step in steps:
        if step.mode == "idle" and step.others_prefill:
            waiting += decoded
        elif step.mode == "decode":
            count, waiting, decoded = count + waiting, 0, True
        else:
            waiting, decoded = 0, False
    return count
