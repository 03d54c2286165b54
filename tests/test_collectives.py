"""Data-parallel attention over gloo: every rank in step, IDLE ranks included, and lossless (C20).

One server for each layout, under a load in which every set of data-parallel ranks prefills while the others are
IDLE, and decodes. SGLang never lets one rank prefill while another decodes under speculation.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.config.plugin_config import CONFIG_ENV
from dflash_sglang.demo.server import Server
from dflash_sglang.pair import held_out_prompts, pair_directories
from tests.collectives import Collective, Step, recorded, steps
from tests.engines import greedy_params, serve
from tests.test_parallel import ask, continuations

pytestmark = pytest.mark.slow

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
CHUNK = 16  # tokens that a rank prefills in one step
LENGTHS = (40, 33, 47, 70, 3)  # three chunks and more, so that ranks asked at once prefill at once
NEW_TOKENS = 24
ROUNDS = 3  # a mix that a busy machine's timing left out is asked for again
COMMON = dict(mem_fraction_static=0.3, max_total_tokens=4096, watchdog_timeout=60)


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


LAYOUTS = (
    Layout(2, 2, False),
    Layout(2, 2, True),
    Layout(2, 4, False, proposals="drawn"),
    Layout(2, 4, True),
    Layout(4, 4, False),
    Layout(4, 4, True),
)


@dataclass
class Served:
    layout: Layout
    steps: list[tuple[Step, ...]]  # [steps][tensor-parallel ranks]
    answers: list[tuple[int, dict[str, Any]]]  # with the number of the prompt


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text = "\n".join(held_out_prompts()).encode()
    return [list(text[1000 * i : 1000 * i + length]) for i, length in enumerate(LENGTHS)]


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
        answers = _every_mix(server, layout, directory, prompts)
        answers += _uneven_burst(server, layout, prompts)
        return Served(layout, _in_step(directory, layout), answers)


def _every_mix(
    server: Server, layout: Layout, directory: Path, prompts: list[list[int]]
) -> list[tuple[int, dict[str, Any]]]:
    answers = []
    for _ in range(ROUNDS):
        missing = layout.mixes() - _mixes(layout, _in_step(directory, layout))
        for busy in {tuple(mode != "idle" for mode in mix) for mix in missing}:
            ranks = [rank for rank in range(layout.dp) if busy[rank]]
            asked = [_request(prompts[rank], routed_dp_rank=rank) for rank in ranks]
            answers += zip(ranks, ask(server, asked, together=True), strict=True)
    return answers


def _uneven_burst(server: Server, layout: Layout, prompts: list[list[int]]) -> list[tuple[int, dict[str, Any]]]:
    """Greedy and sampled requests, two thirds of them to the last rank."""
    numbers = [number for number, _ in enumerate(prompts)] * 2
    ranks = [layout.dp - 1 if i % 3 else i // 3 % layout.dp for i, _ in enumerate(numbers)]
    greedy = [_request(prompts[n], routed_dp_rank=rank) for n, rank in zip(numbers, ranks, strict=True)]
    sampled = [_request(prompts[0], routed_dp_rank=rank, temperature=1.0) for rank in range(layout.dp)]
    answers = ask(server, greedy + sampled, together=True)
    return list(zip(numbers, answers, strict=False))


def _request(prompt: list[int], *, routed_dp_rank: int, **sampling: Any) -> dict[str, Any]:
    params = greedy_params(NEW_TOKENS, **sampling)
    return dict(input_ids=prompt, routed_dp_rank=routed_dp_rank, sampling_params=params)


def _in_step(directory: Path, layout: Layout) -> list[tuple[Step, ...]]:
    """All steps once every rank has ended the same number of them, for a second: the server is at rest."""
    deadline, before = time.monotonic() + 30, None
    while time.monotonic() < deadline:
        of_ranks = [steps(directory, rank) for rank in range(layout.tp)]
        counts = [len(of_rank) for of_rank in of_ranks]
        if len(set(counts)) == 1 and counts == before:
            return list(zip(*of_ranks, strict=True))
        before = counts
        time.sleep(0.3)
    raise AssertionError(f"steps that each rank ended: {counts}")


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
        crossing = [one for one in step[0].collectives if _crosses(layout, one)]
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
        assert answer["output_ids"] == plain[number], f"prompt {number}"


def _crosses(layout: Layout, one: Collective) -> bool:
    return len({rank * layout.dp // layout.tp for rank in one.ranks}) > 1
