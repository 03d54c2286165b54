"""Data-parallel attention over gloo: every rank in step, IDLE ranks included, and lossless (C20).

One server for each layout, under a load in which every set of data-parallel ranks prefills while the others are
IDLE, and decodes. SGLang never lets one rank prefill while another decodes under speculation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_parallel import ask, continuations
from tests.support.collectives import Collective, Step, all_ended, recorded, steps
from tests.support.engines import greedy_params, serve
from training.pair import held_out_prompts, pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
CHUNK = 16  # tokens that a rank prefills in one step
STAY = 8  # tokens that a rank decodes longer than the one that ends before it
BURSTS = 30  # that may be needed until every mix has occurred; a busy machine's timing leaves some out
NEW_TOKENS = 4 * STAY
COMMON = dict(mem_fraction_static=0.3, max_total_tokens=1024, watchdog_timeout=60)


@dataclass(frozen=True)
class Layout:
    dp: int
    tp: int
    dp_lm_head: bool
    proposals: str = "auto"

    def __str__(self) -> str:
        return f"dp {self.dp} tp {self.tp}{' dp-lm-head' * self.dp_lm_head}"

    def rank(self, dp_rank: int) -> int:
        """The first of a data-parallel rank's tensor-parallel ranks."""
        return dp_rank * self.tp // self.dp

    def mixes(self) -> set[tuple[str, ...]]:
        """What the data-parallel ranks can do in a step: some prefill, or some decode, and the others are idle."""
        each = itertools.product((True, False), repeat=self.dp)
        return {
            tuple(mode if busy else "idle" for busy in ranks)
            for ranks in each
            if any(ranks)
            for mode in ("prefill", "decode")
        }


# The draft's head is whole on each rank, or sharded: over all ranks, or over those with the same batch.
LAYOUTS = (
    Layout(2, 2, True),
    Layout(4, 4, False, proposals="drawn"),
)


@dataclass
class Served:
    layout: Layout
    steps: list[tuple[Step, ...]]  # [steps][tensor-parallel ranks]
    answers: list[tuple[int, dict[str, Any]]]  # with the number of the prompt


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of one chunk, two, ...; the last one of a single token."""
    text = "\n".join(held_out_prompts()).encode()
    lengths = [CHUNK * (i + 1) - i for i in range(4)] + [1]
    return [list(text[1000 * i : 1000 * i + length]) for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return continuations(TARGET, prompts, NEW_TOKENS)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> Served:
    layout: Layout = request.param
    directory = tmp_path_factory.mktemp("steps")
    environment = recorded(directory, **{CONFIG_ENV: f'{{"proposals": "{layout.proposals}"}}'})
    arguments = dict(
        tp_size=layout.tp,
        dp_size=layout.dp,
        enable_dp_attention=True,
        enable_dp_lm_head=layout.dp_lm_head,
        chunked_prefill_size=CHUNK * layout.dp,
        disable_radix_cache=True,
        **COMMON,
    )
    with serve(TARGET, DRAFT, environment=environment, **arguments) as server:
        answers = [*bursts(server, directory, layout, prompts), *uneven(server, layout, prompts)]
        return Served(layout, all_ended(directory, layout.tp), answers)


def bursts(
    server: Server, directory: Path, layout: Layout, prompts: Sequence[list[int]]
) -> list[tuple[int, dict[str, Any]]]:
    """Answers to the first prompts, asked until every mix has occurred. directory: of the steps."""
    answers = []
    for _ in range(BURSTS):
        missing = layout.mixes() - _mixes(layout, _ended(directory, layout))
        if not missing:
            break
        answers += _burst(server, prompts, _leaving(missing))
    return answers


def _leaving(missing: set[tuple[str, ...]]) -> list[int]:
    """Data-parallel ranks that are to be busy at once and to end one after the other, in this order: those of a
    missing mix, and wherever it can be those of another missing mix once one has ended."""
    wanted = [{rank for rank, mode in enumerate(mix) if mode != "idle"} for mix in sorted(missing)]
    busy, order = set(max(wanted, key=len)), []
    while busy:
        first = min(busy, key=lambda rank: (busy - {rank} not in wanted, rank))
        order.append(first)
        busy.remove(first)
    return order


def _burst(server: Server, prompts: Sequence[list[int]], order: list[int]) -> list[tuple[int, dict[str, Any]]]:
    asked = [_request(prompts[place], STAY * (place + 1), routed_dp_rank=rank) for place, rank in enumerate(order)]
    return list(enumerate(ask(server, asked, together=True)))


def uneven(server: Server, layout: Layout, prompts: Sequence[list[int]]) -> list[tuple[int, dict[str, Any]]]:
    """Answers to five prompts, most of them asked of the last rank, beside a sampled request of each rank."""
    ranks = [layout.dp - 1] * 4 + [0]
    greedy = [_request(prompt, routed_dp_rank=rank) for prompt, rank in zip(prompts, ranks, strict=True)]
    sampled = [_request(prompts[0], routed_dp_rank=rank, temperature=1.0) for rank in range(layout.dp)]
    return list(enumerate(ask(server, greedy + sampled, together=True)[: len(greedy)]))


def _request(
    prompt: list[int], new_tokens: int = NEW_TOKENS, *, routed_dp_rank: int, **sampling: Any
) -> dict[str, Any]:
    params = greedy_params(new_tokens, **sampling)
    return dict(input_ids=prompt, routed_dp_rank=routed_dp_rank, sampling_params=params)


def _ended(directory: Path, layout: Layout) -> list[tuple[Step, ...]]:
    """The steps that every rank has ended."""
    return list(zip(*(steps(directory, rank) for rank in range(layout.tp)), strict=False))


def _mixes(layout: Layout, of_ranks: list[tuple[Step, ...]]) -> set[tuple[str, ...]]:
    return {tuple(step[layout.rank(dp_rank)].mode for dp_rank in range(layout.dp)) for step in of_ranks}


def test_every_mix_of_idle_and_busy_ranks_occurs(served):
    assert _mixes(served.layout, served.steps) == served.layout.mixes()


def test_all_ranks_of_a_group_issue_the_same_collectives_in_every_step(served):
    for number, step in enumerate(served.steps):
        for rank, of_rank in enumerate(step):
            assert sum(of_rank.issued.values()) == len(of_rank.collectives), f"unseen: step {number}, rank {rank}"
        groups = {(one.group, one.ranks) for of_rank in step for one in of_rank.collectives}
        for group, ranks in groups:
            sequences = [[one for one in step[rank].collectives if one.ranks == ranks] for rank in ranks]
            modes = [step[rank].mode for rank in ranks]
            for rank, sequence in zip(ranks, sequences, strict=True):
                assert sequence == sequences[0], f"step {number}, {group}: ranks {ranks[0]} and {rank} of {modes}"


def test_what_crosses_data_parallel_ranks_is_the_targets_and_a_sharded_drafts_head(served):
    layout = served.layout
    for step in served.steps:
        crossing = [one for one in step[0].collectives if crosses(layout, one)]
        by_draft = [one.operation for one in crossing if one.issuer == "draft"]
        assert {one.issuer for one in crossing} <= {"draft", "target"}
        assert sum(one.issuer == "target" for one in crossing) > 0
        decodes = any(of_rank.mode == "decode" for of_rank in step)
        assert bool(by_draft) == (decodes and not layout.dp_lm_head)


def test_an_idle_rank_writes_no_keys_no_requests_and_plans_no_attention_of_the_draft(served):
    idle = [of_rank for step in served.steps for of_rank in step if of_rank.mode == "idle"]
    assert {of_rank.others_prefill for of_rank in idle} == {True, False}
    assert [of_rank.changed for of_rank in idle if of_rank.changed] == []
    assert {of_rank.requests for of_rank in idle} == {0}


def test_output_equals_plain_decoding_with_uneven_load(served, plain):
    assert {answer["meta_info"]["dp_rank"] for _, answer in served.answers} == set(range(served.layout.dp))
    for number, answer in served.answers:
        ids = answer["output_ids"]
        assert ids == plain[number][: len(ids)], f"prompt {number}"
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": len(ids)}


def test_each_rank_verifies_proposals_for_its_own_requests(served):
    decoded = sum(len(answer["output_ids"]) - 1 for _, answer in served.answers)
    verifies = sum(answer["meta_info"]["spec_verify_ct"] for _, answer in served.answers)
    assert decoded >= 3 * verifies, "few proposals were accepted"


def crosses(layout: Layout, one: Collective) -> bool:
    return len({rank * layout.dp // layout.tp for rank in one.ranks}) > 1
