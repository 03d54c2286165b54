"""Ranks over gloo verify one shape in every step, those of tensor parallelism and of data-parallel attention, IDLE
ranks included, with and without captured steps. C16, C20 and C21 with the width policy on.

Shapes are drawn: nothing follows from times of the machine, and a rank that decided by itself would draw others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.engine.test_parallel import RANKS_ENV, ask, assert_same_tokens_on, continuations, sampled_requests
from tests.engine.test_width_serving import DRAFT, TARGET, prompts, request
from tests.support import recorded_graphs, scheduler_hooks
from tests.support.collectives import all_ended, recorded
from tests.support.engines import serve

pytestmark = [pytest.mark.slow, pytest.mark.full]

RANKS, REQUESTS, NEW_TOKENS = 2, 7, 160
FORMS = ("chain", "ragged", "tree")
SETTINGS = '{"width": {"trees": [16, 32, 64]}}'
FLAGS: dict[str, Any] = dict(tp_size=RANKS, mem_fraction_static=0.3, max_total_tokens=6000, watchdog_timeout=60)
APART = dict(dp_size=RANKS, enable_dp_attention=True)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return continuations(TARGET, prompts()[:REQUESTS], NEW_TOKENS)


def asked(apart: bool = False) -> list[dict[str, Any]]:
    """apart: one request of data-parallel rank 0, all others of rank 1."""
    requests = [request(text, NEW_TOKENS) for text in prompts()[:REQUESTS]]
    return [dict(one, routed_dp_rank=int(n > 1)) for n, one in enumerate(requests)] if apart else requests


def assert_same_rows(directory: Path, forms: Collection[str], at_least: int) -> None:
    """Both ranks noted the same steps, under the hook "shapes", and of each of these forms so many."""
    first, second = (scheduler_hooks.noted(directory, f"shapes.{rank}.jsonl") for rank in range(RANKS))
    assert abs(len(first) - len(second)) <= 1  # one of them may be in a step now
    differing = [number for number, (one, other) in enumerate(zip(first, second, strict=False)) if one != other]
    assert not differing, (len(first), first[differing[0]], second[differing[0]])
    counts = Counter(form for form, *_ in first)
    print(f"{len(first)} steps on both ranks: {dict(counts)}")
    assert all(counts[form] >= at_least for form in forms), counts


def test_tensor_parallel_ranks_verify_the_same_rows_and_commit_the_same_tokens(plain, tmp_path):
    """In graphs, and of every form: with copies and long chains, greedy and sampled, although ranks draw apart."""
    environment = recorded_graphs.recording(
        tmp_path,
        "oracle,widths,shares,trees,copies,chains,shapes",
        "engine.test_parallel",
        **{CONFIG_ENV: '{"copy": 64, "width": {"trees": [16, 32, 64]}}', RANKS_ENV: str(tmp_path)},
    )
    with serve(TARGET, DRAFT, environment=environment, **FLAGS) as server:
        answers = [*ask(server, asked(), together=True), *ask(server, asked()[:1], together=True)]
        sampled = ask(server, sampled_requests(request(prompts()[0], 48)), together=True)
        for one, output in zip(asked(), plain, strict=True):
            scheduler_hooks.record(tmp_path, one["input_ids"], output)
        aided = ask(server, asked()[:4], together=True)
        (state,) = server.get("/server_info")["internal_states"]
    assert [answer["output_ids"] for answer in (*answers, *aided)] == [*plain, plain[0], *plain[:4]]
    assert len({tuple(answer["output_ids"]) for answer in sampled}) > 3
    assert_same_tokens_on(range(RANKS), dict(sampled=sampled, directory=tmp_path))
    assert_same_rows(tmp_path, FORMS, at_least=10)
    assert sum(state["dflash_acceptance"]["shapes"]["copy"].values()) > 3
    first, second = ((tmp_path / f"copies.{rank}.jsonl").read_text() for rank in range(RANKS))
    assert first.count("\n") > 100 and first == second
    verified = {(one.captured, one.requests) for one in recorded_graphs.replays(tmp_path) if one.role == "target"}
    assert verified >= {(1, 1), (8, 7)}


def test_ranks_of_data_parallel_attention_have_one_width_in_every_step(plain, tmp_path):
    """The draft's head is sharded over all ranks. The exchange is one broadcast a step and one gather of loads."""
    environment = recorded(tmp_path, **{CONFIG_ENV: '{"width": {}}', scheduler_hooks.HOOKS_ENV: "widths"})
    with serve(TARGET, DRAFT, environment=environment, **FLAGS, **APART) as server:
        answers = [*ask(server, asked(True)[-1:], together=True), *ask(server, asked(True), together=True)]
        steps = all_ended(tmp_path, RANKS)
    assert [answer["output_ids"] for answer in answers] == [plain[-1], *plain]
    decodes = [step for step in steps if any(of_rank.mode == "decode" for of_rank in step)]
    widths = [{of_rank.width for of_rank in step} for step in decodes]
    assert [number for number, of_step in enumerate(widths) if len(of_step) > 1] == []
    assert len(set.union(*widths)) >= 3
    assert any(of_rank.mode == "idle" for step in decodes for of_rank in step)
    exchanged: Counter[str] = Counter()
    for number, step in enumerate(decodes):
        sequences = [
            [one.operation for one in of_rank.collectives if one.issuer == "worker" and "(cpu)" in one.group]
            for of_rank in step
        ]
        assert sequences[0] == sequences[1], f"step {number}"
        exchanged.update(sequences[0])
    assert exchanged["allgather"] == exchanged["broadcast"] == len(decodes) > 0


def test_captured_steps_of_data_parallel_attention_output_what_plain_decoding_does(plain, tmp_path):
    """Graphs gather and reduce; each rank has a head. Rank 0 has no request, then three; rank 1 one, then five."""
    environment = recorded_graphs.recording(tmp_path)
    with serve(TARGET, DRAFT, environment=environment, enable_dp_lm_head=True, **FLAGS, **APART) as server:
        alone = ask(server, asked(True)[-1:], together=True)
        drawn = dict(asked(True)[0], sampling_params=dict(temperature=1.0, max_new_tokens=64, ignore_eos=True))
        together = ask(server, [*asked(True), drawn], together=True)
        log = server.log_text()
    assert [answer["output_ids"] for answer in (*alone, *together[:-1])] == [plain[-1], *plain]
    assert len(together[-1]["output_ids"]) == 64
    assert "cuda graph: False" not in "".join(line for line in log.splitlines() if "Decode batch" in line)
    drafted, verified = (
        {(one.captured, one.requests) for one in recorded_graphs.replays(tmp_path) if one.role == role}
        for role in ("draft", "target")
    )
    assert drafted >= {(1, 1), (8, 5)} and all(requests for _, requests in drafted), drafted
    assert verified >= {(1, 0)} and any(captured > requests > 0 for captured, requests in verified), verified
