"""Multi-token-prediction layers on ranks with batches of their own, over gloo (C20).

Under data-parallel attention IDLE ranks keep step, in steps of every width. Replicas are servers of their own.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from tests.engine import test_collectives as in_step
from tests.engine.test_collectives import Layout
from tests.engine.test_mtp import Noted, checkpoint, commits_of, noted, ours, plain, wrong_proposals
from tests.engine.test_mtp import prompts as of_test_mtp
from tests.support import scheduler_hooks
from tests.support.collectives import Step, all_ended, steps
from tests.support.engines import greedy, greedy_params, serve

pytestmark = [pytest.mark.slow, pytest.mark.full]

LAYOUTS = (Layout(2, 2, dp_lm_head=False), Layout(2, 4, dp_lm_head=True))
CONFIG: dict[str, Any] = {"width": {"widths": [1, 2, 3, 4]}}
LONG, LONG_TOKENS = 3, 150  # number and tokens of the request that decodes while another rank prefills


def prompts() -> list[list[int]]:
    """Of several chunks, of one, and of one token."""
    by_length = {len(prompt): prompt for prompt in of_test_mtp()}
    return [by_length[length] for length in (65, 33, 2, 100, 1)]


def arguments(layout: Layout) -> dict[str, Any]:
    return dict(
        tp_size=layout.tp,
        dp_size=layout.dp,
        enable_dp_attention=True,
        enable_dp_lm_head=layout.dp_lm_head,
        chunked_prefill_size=in_step.CHUNK * layout.dp,
        disable_radix_cache=True,
        mem_fraction_static=0.3,
        max_total_tokens=4096,
        watchdog_timeout=60,
    )


@dataclass
class Served:
    layout: Layout
    steps: list[tuple[Step, ...]]  # [steps][tensor-parallel ranks]
    answers: list[tuple[int, dict[str, Any]]]  # to greedy requests, with the number of the prompt
    blocks: list[Noted]  # of all ranks
    plain: list[list[int]]


@pytest.fixture(scope="module", params=[LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.release)], ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    layout: Layout = request.param
    with serve(checkpoint(), **arguments(layout)) as server:
        plain = greedy(server, prompts(), LONG_TOKENS)
    directory, hooks = tmp_path_factory.mktemp("ranks"), "mtp,widths,stretches"
    started = ours(directory, hooks, "support.collectives", config=CONFIG, **arguments(layout))
    with started as (server, records):
        for prompt, output in zip(prompts(), plain, strict=True):
            scheduler_hooks.record(records, prompt, output)
        answers = [
            *in_step.bursts(server, records, layout, prompts()),
            *in_step.uneven(server, layout, prompts()),
            *beside_a_prefill(server, records),
        ]
        for rank in range(layout.dp):
            params = dict(temperature=1.5, max_new_tokens=in_step.NEW_TOKENS, ignore_eos=True)
            server.generate(input_ids=[5, 6, 7], rid=f"drawn {rank}", routed_dp_rank=rank, sampling_params=params)
        ended = all_ended(records, layout.tp)
        blocks = [Noted(*row) for row in scheduler_hooks.noted(records, "mtp.jsonl")]
        return Served(layout, ended, answers, blocks, plain)


def beside_a_prefill(server: Server, records: Path) -> list[tuple[int, dict[str, Any]]]:
    """Answers to a long request of rank 0, and to one that rank 1 prefills meanwhile."""

    def ask(number: int, rank: int, tokens: int) -> tuple[int, dict[str, Any]]:
        params = greedy_params(tokens)
        return number, server.generate(input_ids=prompts()[number], routed_dp_rank=rank, sampling_params=params)

    with ThreadPoolExecutor(1) as pool:
        before = len(steps(records, 0))
        first = pool.submit(ask, LONG, 0, LONG_TOKENS)
        while not any(step.mode == "decode" for step in steps(records, 0)[before:]):
            time.sleep(0.02)
        return [ask(0, 1, in_step.STAY), first.result()]


@pytest.mark.matrix(
    target="Step-3.5", draft="its own MTP layers", kv="model dtype, data-parallel attention", outcome="works"
)
def test_output_is_plain_decodings_with_idle_ranks_and_uneven_load(served: Served) -> None:
    in_step.test_every_mix_of_idle_and_busy_ranks_occurs(served)
    in_step.test_output_equals_plain_decoding_with_uneven_load(served, served.plain)


def test_a_rank_whose_requests_decode_is_idle_while_another_prefills(served: Served) -> None:
    named = ["waits" if rank.mode == "idle" and rank.others_prefill else rank.mode for rank, *_ in served.steps]
    modes = [mode for mode, _ in groupby(named)]
    assert ["decode", "waits", "decode"] in [modes[i : i + 3] for i in range(len(modes))]


def test_ranks_issue_the_same_collectives_and_none_of_the_drafts_crosses_batches(served: Served) -> None:
    in_step.test_all_ranks_of_a_group_issue_the_same_collectives_in_every_step(served)
    of_draft = [one for step in served.steps for of_rank in step for one in of_rank.collectives]
    of_draft = [one for one in of_draft if one.issuer == "draft"]
    assert bool(of_draft) == (served.layout.tp > served.layout.dp)
    assert not any(in_step.crosses(served.layout, one) for one in of_draft)


def test_an_idle_rank_writes_nothing(served: Served) -> None:
    in_step.test_an_idle_rank_writes_no_keys_no_requests_and_plans_no_attention_of_the_draft(served)


def test_proposals_are_the_references_at_every_width_and_alike_on_ranks_of_one_batch(served: Served) -> None:
    texts = {a["meta_info"]["id"]: prompts()[number] + a["output_ids"] for number, a in served.answers}
    blocks = [block for block in served.blocks if block.rid in texts]
    assert wrong_proposals(blocks, texts) == 0
    assert {len(block.chosen) + 1 for block in blocks} == set(CONFIG["width"]["widths"])
    commits = commits_of(blocks)
    assert commits >= {1, 2, 3, 4}, commits
    drawn = [block for block in served.blocks if block.rid.startswith("drawn")]
    assert any(block.chosen != block.likeliest for block in drawn)
    assert {drawn.count(block) for block in drawn} == {served.layout.tp // served.layout.dp}


@pytest.mark.matrix(target="Step-3.5", draft="its own MTP layers", kv="model dtype, replicas", outcome="works")
def test_each_replica_outputs_what_plain_decoding_outputs(tmp_path: Path) -> None:
    with ours(tmp_path, "mtp", dp_size=2, mem_fraction_static=0.3) as (server, records):
        texts = {}
        for prompt, output in zip(of_test_mtp(), plain(), strict=True):
            scheduler_hooks.record(records, prompt, output)
            for rank in range(2):
                rid = f"text {len(prompt)} {rank}"
                params = greedy_params(len(output))
                answer = server.generate(input_ids=prompt, rid=rid, routed_dp_rank=rank, sampling_params=params)
                assert (answer["output_ids"], answer["meta_info"]["dp_rank"]) == (output, rank)
                texts[rid] = prompt + output
    assert wrong_proposals(noted(records), texts) == 0
