"""Multi-token-prediction layers under data-parallel attention, two ranks to a batch, over gloo (C20): IDLE ranks
keep step, in steps of every width."""

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
from tests.engine.test_mtp import CONFIG, HOOKS, WIDTHS, Noted, checkpoint, commits_of, ours, wrong_proposals
from tests.engine.test_mtp import prompts as of_test_mtp
from tests.support import scheduler_hooks
from tests.support.collectives import Step, all_ended, steps
from tests.support.engines import greedy, greedy_params, serve

pytestmark = [pytest.mark.slow, pytest.mark.full]

LAYOUT = Layout(2, 4, dp_lm_head=True)
ARGUMENTS: dict[str, Any] = dict(
    tp_size=LAYOUT.tp,
    dp_size=LAYOUT.dp,
    enable_dp_attention=True,
    enable_dp_lm_head=LAYOUT.dp_lm_head,
    chunked_prefill_size=in_step.CHUNK * LAYOUT.dp,
    disable_radix_cache=True,
    mem_fraction_static=0.3,
    max_total_tokens=4096,
    watchdog_timeout=60,
)
LONG, LONG_TOKENS = 3, 150  # number and tokens of the request that decodes while another rank prefills


def prompts() -> list[list[int]]:
    """Of several chunks, of one, and of one token."""
    by_length = {len(prompt): prompt for prompt in of_test_mtp()}
    return [by_length[length] for length in (65, 33, 2, 100, 1)]


@dataclass
class Served:
    """What `test_collectives` reads of a run."""

    layout: Layout
    steps: list[tuple[Step, ...]]  # [steps][ranks]
    answers: list[tuple[int, dict[str, Any]]]  # to greedy requests, with the number of the prompt


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
def test_ranks_with_idle_ones_and_uneven_load_output_what_plain_decoding_does(tmp_path: Path) -> None:
    """Proposals are the reference's at every width, and alike on ranks of one batch, drawn ones too."""
    with serve(checkpoint(), **ARGUMENTS) as server:
        plain = greedy(server, prompts(), LONG_TOKENS)
    with ours(tmp_path, f"mtp,{HOOKS}", "support.collectives", config=CONFIG, **ARGUMENTS) as (server, records):
        for prompt, output in zip(prompts(), plain, strict=True):
            scheduler_hooks.record(records, prompt, output)
        answers = [
            *in_step.bursts(server, records, LAYOUT, prompts()),
            *in_step.uneven(server, LAYOUT, prompts()),
            *beside_a_prefill(server, records),
        ]
        for rank in range(LAYOUT.dp):
            params = dict(temperature=1.5, max_new_tokens=in_step.NEW_TOKENS, ignore_eos=True)
            server.generate(input_ids=[5, 6, 7], rid=f"drawn {rank}", routed_dp_rank=rank, sampling_params=params)
        served = Served(LAYOUT, all_ended(records, LAYOUT.tp), answers)
        blocks = [Noted(*row) for row in scheduler_hooks.noted(records, "mtp.jsonl")]
    in_step.test_every_mix_of_idle_and_busy_ranks_occurs(served)
    in_step.test_output_equals_plain_decoding_with_uneven_load(served, plain)
    in_step.test_an_idle_rank_writes_no_keys_no_requests_and_plans_no_attention_of_the_draft(served)
    # A rank whose requests decode is idle while another one prefills.
    named = ["waits" if rank.mode == "idle" and rank.others_prefill else rank.mode for rank, *_ in served.steps]
    modes = [mode for mode, _ in groupby(named)]
    assert ["decode", "waits", "decode"] in [modes[i : i + 3] for i in range(len(modes))]
    # Ranks issue the same collectives; the draft's stay within a batch.
    in_step.test_all_ranks_of_a_group_issue_the_same_collectives_in_every_step(served)
    issued = [one for step in served.steps for of_rank in step for one in of_rank.collectives]
    of_draft = [one for one in issued if one.issuer == "draft"]
    assert of_draft and not any(in_step.crosses(LAYOUT, one) for one in of_draft)

    texts = {a["meta_info"]["id"]: prompts()[number] + a["output_ids"] for number, a in answers}
    of_texts = [block for block in blocks if block.rid in texts]
    assert wrong_proposals(of_texts, texts) == 0
    assert {len(block.chosen) + 1 for block in of_texts} == set(WIDTHS)
    assert commits_of(of_texts) >= {1, 2, 3, 4}
    drawn = [block for block in blocks if block.rid.startswith("drawn")]
    assert any(block.chosen != block.likeliest for block in drawn)
    assert {drawn.count(block) for block in drawn} == {LAYOUT.tp // LAYOUT.dp}
