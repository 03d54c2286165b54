"""Tensor-parallel ranks, data-parallel replicas and nodes over gloo, lossless on the CPU platform (C21).

The servers run one after the other. What they are asked, and the answers, outlive them; each loses a rank at last.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.demo.server import Server, ServerFailed
from dflash_sglang.settings.plugin_config import CONFIG_ENV, REQUIRE_ENV
from tests.support import scheduler_hooks, tiny
from tests.support.engines import accepted_proposals, greedy_params, serve, serve_on_nodes
from tests.support.faults import NO_DUMPS, end_of, lose
from training.pair import held_out_prompts, pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 127, 700)
NEW_TOKENS = 48
SAMPLED_PROMPT = LENGTHS.index(2)  # many tokens may follow it, from the first on
PATIENCE = 120.0  # seconds for the answers to one round of requests
RANKS = dict(
    mem_fraction_static=0.5,  # of the memory free at the start: the other rank takes its own meanwhile
    watchdog_timeout=60,  # seconds: ranks that disagree wait for each other
)
SHORT_WATCHDOG = 10  # seconds
RANKS_ENV = "DFLASH_TEST_RANKS"
SAMPLED: tuple[dict[str, Any], ...] = (
    dict(temperature=1.0),
    dict(temperature=0.7, top_p=0.9),
    dict(temperature=1.3, top_k=40),
    dict(temperature=1.0, min_p=0.05),
    dict(temperature=0.9, top_p=0.95, top_k=20, repetition_penalty=1.1),
    dict(temperature=0),
)


def requests() -> list[dict[str, Any]]:
    """Greedy requests of 1 to 700 tokens of held-out text (a token is a byte), and one with a grammar."""
    text = "\n".join(held_out_prompts()).encode()
    prompts = [list(text[1000 * i : 1000 * i + length]) for i, length in enumerate(LENGTHS)]
    asked = [dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS)) for prompt in prompts]
    grammar = greedy_params(NEW_TOKENS, regex="(ab|cd){4,9}!", ignore_eos=False)
    return [*asked, dict(input_ids=prompts[6], sampling_params=grammar)]


def sampled_requests(greedy: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(greedy, sampling_params=greedy["sampling_params"] | params) for params in SAMPLED]


def long_request() -> dict[str, Any]:
    """One that runs for seconds: long enough to lose a rank meanwhile."""
    return dict(requests()[6], sampling_params=greedy_params(3000))


def next_turns(asked: dict[str, Any], answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(asked, input_ids=asked["input_ids"] + answer["output_ids"]) for answer in answers]


def ask(server: Server, asked: Sequence[dict[str, Any]], *, together: bool) -> list[dict[str, Any]]:
    """The answers, in order. Raises ServerFailed with the server's log where one fails or does not come."""
    pool = ThreadPoolExecutor(len(asked) if together else 1)
    try:
        futures = [pool.submit(server.generate, **one) for one in asked]
        done, missing = wait(futures, PATIENCE, FIRST_EXCEPTION)
        failed = [error for future in done if (error := future.exception())]
        if failed or missing:
            raise ServerFailed(f"{len(missing)} answers missing, errors: {failed}\n{server.log_tail(80)}")
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def essence(answers: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]) for answer in answers]


def steps(answers: list[dict[str, Any]]) -> int:
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def watched(directory: Path, *plugins: str, **environment: str) -> dict[str, str]:
    """The environment of a server of ours whose ranks write into `directory` and may read an oracle's records.
    plugins: more modules, as of `scheduler_hooks.install`."""
    environment = {RANKS_ENV: str(directory), **NO_DUMPS, **environment}
    return scheduler_hooks.hooked(directory, "", "engine.test_parallel", *plugins, **environment)


def activate() -> None:
    """Entry point in a scheduler: the ranks draw different random numbers, and write down what they commit."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Not earlier: the scheduler seeds all ranks alike at the end of its construction.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", _watch_rank, HookType.BEFORE)


def _watch_rank(scheduler: Any) -> None:
    from sglang.srt.runtime_context import get_parallel

    from dflash_sglang.worker import DFlashWorker

    rank = get_parallel().tp_rank
    torch.manual_seed(rank)
    commits = _commits(Path(os.environ[RANKS_ENV]), rank).open("w", buffering=1)
    forward = DFlashWorker.forward_batch_generation

    def then_write(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        requests = [req.rid for req in batch.reqs]
        result = forward(self, batch, *args, **kwargs)
        tokens = result.next_token_ids.view(len(requests), -1).tolist()
        lens = [1] * len(requests) if result.accept_lens is None else result.accept_lens.tolist()
        for request, row, commit_len in zip(requests, tokens, lens, strict=True):
            print(json.dumps([request, row[:commit_len]]), file=commits)
        return result

    DFlashWorker.forward_batch_generation = then_write


def _commits(directory: Path, rank: int) -> Path:
    return directory / f"commits-{rank}.jsonl"


def committed(directory: Path, rank: int, request: str) -> list[int]:
    """All that a rank committed for a request; overlap scheduling runs a step past its end."""
    steps = map(json.loads, _commits(directory, rank).read_text().splitlines())
    return [token for name, tokens in steps if name == request for token in tokens]


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    """What two tensor-parallel ranks answer without speculation."""
    with serve(TARGET, tp_size=2, skip_tokenizer_init=None, **RANKS) as server:
        return ask(server, requests(), together=False)


def continuations(target: Path, prompts: list[list[int]], max_new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    settings = dict(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    outputs = [model.generate(torch.tensor([prompt]), **settings)[0].tolist() for prompt in prompts]
    return [output[len(prompt) :] for prompt, output in zip(prompts, outputs, strict=True)]


def walks(server: Server, greedy: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Sampled answers, and their next turns after a prefix hit and cold."""
    sampled = ask(server, sampled_requests(greedy), together=True)
    turns = next_turns(greedy, sampled)
    after_hit = ask(server, turns, together=True)
    server.post("/flush_cache?timeout=60")  # waits for the scheduler to be idle
    cold = ask(server, turns, together=True)
    return dict(sampled=sampled, after_hit=after_hit, cold=cold, directory=directory)


@pytest.fixture(scope="module")
def replicas() -> dict[str, Any]:
    """What two data-parallel replicas answer, each by itself and together; at last one of them dies."""
    environment = {REQUIRE_ENV: "1", **NO_DUMPS}
    with serve(TARGET, DRAFT, environment=environment, dp_size=2, skip_tokenizer_init=None, **RANKS) as server:
        singly = [
            ask(server, [dict(one, routed_dp_rank=rank) for one in requests()], together=False)
            for rank in range(2)
        ]
        together = ask(server, requests(), together=True)
        sampled = ask(server, sampled_requests(requests()[SAMPLED_PROMPT]), together=True)
        log = server.log_text()
        asked = dict(long_request(), routed_dp_rank=0)
        end = lose(server, "scheduler_DP1", signal.SIGKILL, asked, patience=PATIENCE)
    return dict(singly=singly, together=together, sampled=sampled, log=log, end=end)


def test_each_data_parallel_replica_outputs_what_plain_decoding_outputs(plain, replicas):
    assert replicas["log"].count("worker active") == 2
    for rank, answers in enumerate(replicas["singly"]):
        assert {answer["meta_info"]["dp_rank"] for answer in answers} == {rank}
        assert essence(answers) == essence(plain), f"replica {rank}"
    assert {answer["meta_info"]["dp_rank"] for answer in replicas["together"]} == {0, 1}
    assert essence(replicas["together"]) == essence(plain)
    assert_sampled(replicas["sampled"], plain[SAMPLED_PROMPT]["output_ids"])


def test_a_replica_that_dies_ends_the_server_and_is_named(replicas):
    end = replicas["end"]
    assert end.seconds < 30 and end.left == []
    assert re.search(r"sglang::scheduler_DP1 \(pid \d+\) was ended by SIGKILL\. The server ends\.", end.log)


def test_two_ranks_are_lossless_and_commit_the_same_and_end_where_one_stops(plain, replicas, tmp_path):
    """All ranks, which draw apart, keep the keys and values of the tokens that were answered. The server ends
    after the watchdog's time and names the rank."""
    arguments = {**RANKS, "watchdog_timeout": SHORT_WATCHDOG, "tp_size": 2, "skip_tokenizer_init": None}
    with serve(TARGET, DRAFT, environment=watched(tmp_path), **arguments) as server:
        singly = ask(server, requests(), together=False)
        served = walks(server, requests()[SAMPLED_PROMPT], tmp_path)
        together = ask(server, requests(), together=True)
        assert server.log_text().count("worker active") == 1
        end = lose(server, "scheduler_TP1", signal.SIGSTOP, long_request(), patience=PATIENCE)
    assert essence(singly) == essence(together) == essence(plain)
    assert_sampled(served["sampled"], plain[SAMPLED_PROMPT]["output_ids"])
    assert_same_on_all_ranks(served)
    assert sum(len(answer["output_ids"]) - 1 for answer in singly) >= 3 * steps(singly)
    assert steps(singly) == pytest.approx(steps(replicas["singly"][0]), rel=0.02), "a shard is as good as a whole"
    # SGLang looks every half of it, and gives the launcher five seconds.
    assert SHORT_WATCHDOG <= end.seconds < 2 * SHORT_WATCHDOG + 30 and end.left == []
    assert "TP0] Scheduler watchdog timeout" in end.log
    assert re.search(r"scheduler_1 \(pid \d+\) is stopped\.", end.log)


def test_four_ranks_are_lossless_and_commit_the_same_and_end_where_one_dies(plain, replicas, tmp_path):
    """Each has one query head of four, one of two KV heads that are there twice, and 80 of the head's rows."""
    arguments = {**RANKS, "mem_fraction_static": 0.3, "tp_size": 4, "skip_tokenizer_init": None}
    with serve(TARGET, DRAFT, environment=watched(tmp_path), **arguments) as server:
        greedy = ask(server, requests(), together=True)
        sampled = ask(server, sampled_requests(requests()[SAMPLED_PROMPT]), together=True)
        end = lose(server, "scheduler_TP2", signal.SIGKILL, long_request(), patience=PATIENCE)
    assert essence(greedy) == essence(plain)
    assert_sampled(sampled, plain[SAMPLED_PROMPT]["output_ids"])
    assert_same_tokens_on(range(4), dict(sampled=sampled, directory=tmp_path))
    assert steps(greedy) == pytest.approx(steps(replicas["singly"][0]), rel=0.02)
    assert end.seconds < 30 and end.left == []
    assert re.search(r"scheduler_2 \(pid[ =]\d+\) (was ended by SIGKILL|crashed with exit code -9)", end.log)


def test_two_nodes_are_lossless_and_commit_the_same_and_end_where_one_dies(plain, tmp_path):
    """Two launchers of one tensor-parallel rank each."""
    arguments = {**RANKS, "mem_fraction_static": 0.4, "tp_size": 2, "skip_tokenizer_init": None}
    with serve_on_nodes(2, TARGET, DRAFT, environment=watched(tmp_path), **arguments) as (first, second):
        greedy = ask(first, requests(), together=True)
        sampled = ask(first, sampled_requests(requests()[SAMPLED_PROMPT]), together=True)
        end = end_of(first, second.process.pid, signal.SIGKILL, long_request(), patience=PATIENCE)
        second.process.wait(PATIENCE)
    assert essence(greedy) == essence(plain)
    assert_sampled(sampled, plain[SAMPLED_PROMPT]["output_ids"])
    assert_same_tokens_on(range(2), dict(sampled=sampled, directory=tmp_path))
    assert end.seconds < 30 and end.left == []
    assert re.search(r"TP0\] Scheduler hit an exception: (.|\n)*(Connection|closed|reset|remote)", end.log)


def test_models_that_do_not_divide_by_the_ranks_are_lossless_at_every_accept_length(tmp_path):
    """Random models with one KV head, and a tied head of 32 tokens and 8. Sampled requests get drawn proposals,
    greedy ones an oracle's."""
    shape = dict(num_key_value_heads=1, vocab_size=40, tie_word_embeddings=True)
    target, draft = tiny.make_pair(tmp_path, target=shape, draft=shape)
    ids = random.Random(0)
    prompts = [[ids.randrange(4, 40) for _ in range(length)] for length in LENGTHS]
    expected = continuations(target, prompts)
    asked = [dict(input_ids=prompt, sampling_params=greedy_params(NEW_TOKENS)) for prompt in prompts]
    environment = watched(tmp_path, **{scheduler_hooks.HOOKS_ENV: "oracle", CONFIG_ENV: '{"proposals": "drawn"}'})
    with serve(target, draft, environment=environment, tp_size=2, **RANKS) as server:
        served = walks(server, asked[SAMPLED_PROMPT], tmp_path)
        for prompt, output in zip(prompts, expected, strict=True):
            scheduler_hooks.record(tmp_path, prompt, output)
        answers = [*ask(server, asked, together=True), *ask(server, asked, together=False)]
    assert [answer["output_ids"] for answer in answers] == expected * 2
    assert set(accepted := accepted_proposals(answers)) == set(range(8)), accepted
    assert_sampled(served["sampled"], expected[SAMPLED_PROMPT])
    assert_same_on_all_ranks(served)


def assert_sampled(answers: list[dict[str, Any]], greedy: list[int]) -> None:
    """Of `sampled_requests()`: full length, drawn where asked to, and `greedy` where asked to."""
    *drawn, undrawn = [answer["output_ids"] for answer in answers]
    assert {len(ids) for ids in drawn} == {NEW_TOKENS}
    assert undrawn == greedy
    assert sum(ids != greedy for ids in drawn) >= len(drawn) // 2


def assert_same_on_all_ranks(served: dict[str, Any]) -> None:
    """All ranks committed what was answered, and keep the keys and values of those very tokens."""
    assert_same_tokens_on(range(2), served)
    assert all(answer["meta_info"]["cached_tokens"] >= NEW_TOKENS for answer in served["after_hit"])
    for after_hit, cold in zip(served["after_hit"], served["cold"], strict=True):
        assert after_hit["output_ids"] == cold["output_ids"]


def assert_same_tokens_on(ranks: Sequence[int], served: dict[str, Any]) -> None:
    for answer in served["sampled"]:
        for rank in ranks:
            ids = committed(served["directory"], rank, answer["meta_info"]["id"])
            assert ids[: len(answer["output_ids"])] == answer["output_ids"], f"rank {rank}"


def assert_ranks_take_the_same_walks(
    server: Server, asked: Sequence[dict[str, Any]], expected: Sequence[list[int]], directory: Path
) -> None:
    """Of ranks that draw apart and are `watched`: greedy outputs are the expected ones, and sampled ones, before
    and after a prefix hit, are the same on all of them."""
    served = walks(server, asked[0], directory)
    greedy = ask(server, asked, together=True)
    assert [answer["output_ids"] for answer in greedy] == expected
    assert_sampled(served["sampled"], expected[0])
    assert_same_on_all_ranks(served)
