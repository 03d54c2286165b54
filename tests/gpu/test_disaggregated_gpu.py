"""Prefill and decode on different servers over SGLang's nixl backend, on one GPU, or on two where they are there.

Needs the `nixl` package. In bfloat16 outputs may part where two tokens are almost tied: see `test_width_gpu`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import REQUIRE_ENV
from tests.engine.test_recurrent_serving import first_turns
from tests.gpu.test_recurrent_gpu import LAUNCHES, assert_same_distributions, with_logprobs
from tests.gpu.test_width_gpu import assert_plain_decodings
from tests.support import scheduler_hooks
from tests.support.disaggregated import Apart, decode_beside, serve_apart
from tests.support.engines import RETRACTING, ask_at_once, greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE
from tests.zoo import pair_for
from training.pair import held_out_prompts, pair_directories

pytest.importorskip("nixl", reason="needs the package nixl, which moves KV between the servers")

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
GPUS = torch.cuda.device_count()
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
NEW_TOKENS = 160
MANY = 32  # requests at once
SHARE = 0.5  # of a GPU's memory at most; pools have 20000 tokens, so four servers fit
FLAGS: dict[str, Any] = {
    **ON_DEVICE,
    "mem_fraction_static": SHARE,
    "max_running_requests": MANY,
    "cuda_graph_max_bs_decode": MANY,
}
# Servers that start at the same time find different amounts of memory free on each GPU.
ENVIRONMENT = {**DEVICE_ENVIRONMENT, "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
OURS = {**ENVIRONMENT, REQUIRE_ENV: "1"}
OVER: dict[str, Any] = dict(backend="nixl")
ON_THE_OTHER: dict[str, Any] = dict(base_gpu_id=1) if GPUS > 1 else {}


def asked(count: int = 80, new_tokens: int = NEW_TOKENS) -> list[dict[str, Any]]:
    """Of the held-out prompts, the shortest first."""
    prompts = [list(text.encode()) for text in held_out_prompts()]
    assert len(prompts) == 80
    params = greedy_params(new_tokens)
    return [dict(input_ids=prompt, sampling_params=params) for prompt in prompts[:: 80 // count][:count]]


def steps_of(answers: Sequence[Mapping[str, Any]]) -> int:
    return sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def accept_length(answers: Sequence[Mapping[str, Any]]) -> float:
    return sum(answer["meta_info"]["completion_tokens"] for answer in answers) / steps_of(answers)


def alike(some: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The answers that have the same output: behind an almost tied token it is another text."""
    return [both for both in zip(some, others, strict=True) if both[0]["output_ids"] == both[1]["output_ids"]]


def assert_as_many_steps(some: Sequence[Any], others: Sequence[Any], least: int) -> None:
    """In equal outputs, of which there are `least`."""
    equal = alike(some, others)
    steps = [steps_of([both[i] for both in equal]) for i in range(2)]
    print(f"{len(equal)} of {len(some)} outputs are equal, in {steps[0]} and {steps[1]} verify steps")
    assert len(equal) >= least and abs(steps[0] / steps[1] - 1) <= 0.02


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with serve(TARGET, environment=ENVIRONMENT, **FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def one() -> Iterator[Server]:
    """A server that prefills and decodes."""
    with serve(TARGET, DRAFT, environment=OURS, **FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    directory = tmp_path_factory.mktemp("apart")
    with serve_apart(TARGET, DRAFT, directory, environment=OURS, decode=ON_THE_OTHER, **OVER, **FLAGS) as both:
        yield both


def test_output_is_plain_decodings_cold_and_from_the_prefill_servers_cache(apart, plain):
    apart.assert_idle()
    requests = asked(16)
    cold = apart.ask_all(requests, at_once=MANY)
    # A prefill server caches the prompt itself, but for its last token.
    warm = [apart.ask_both(**request) for request in requests]
    for request, answers in zip(requests, warm, strict=True):
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        assert min(cached) >= len(request["input_ids"]) - 1, cached
    assert_plain_decodings(plain, requests, cold)
    assert_plain_decodings(plain, requests, [decode for _, decode in warm])
    apart.assert_idle()


def test_accept_length_is_that_of_one_server(apart, one):
    """One by one, so that both servers have batches of the same sizes."""
    for server in (apart.prefill, one):
        server.post("/flush_cache?timeout=60")
    here, there = ([ask(**request) for request in asked()] for ask in (one.generate, apart.ask))
    lengths = [accept_length(answers) for answers in (here, there)]
    print(f"accept length of one server {lengths[0]:.4f}, with prefill and decode apart {lengths[1]:.4f}")
    assert len(alike(here, there)) >= 40
    assert abs(lengths[1] / lengths[0] - 1) <= 0.01


def random_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Short prompts of random lengths. Half of them begin as one before them, which may still be on its way."""
    rng, prompts = random.Random(seed), list[list[int]]()
    for number in range(count):
        prompt = rng.choices(range(5, 200), k=rng.randint(2, 300))
        if number % 2:
            before = rng.choice(prompts[-MANY:])
            prompt = before[: rng.randint(1, len(before))] + prompt[: rng.randint(1, 40)]
        prompts.append(prompt)
    return [dict(input_ids=prompt, sampling_params=greedy_params(rng.randint(1, 8))) for prompt in prompts]


TRANSFERS: dict[str, dict[str, Any]] = {
    "in chunks of 64": dict(chunked_prefill_size=64),
    "in chunks of 64, without overlap": dict(chunked_prefill_size=64, disable_overlap_schedule=True),
    "pages of 64, with SGLang's own checksums": dict(page_size=64, disaggregation_enable_kv_checksum=True),
    "from two ranks": dict(prefill=dict(tp_size=2)),
    "to two ranks": dict(prefill=ON_THE_OTHER, decode=dict(tp_size=2)),
}


@pytest.mark.parametrize(
    "transfer", [pytest.param(name, marks=TWO_GPUS if "ranks" in name else ()) for name in TRANSFERS]
)
def test_rows_of_target_and_draft_arrive_as_they_were_prefilled(tmp_path, transfer):
    """1000 requests, bit by bit, and one whose rows are told otherwise."""
    flags = {"decode": ON_THE_OTHER, **TRANSFERS[transfer]}
    environment = scheduler_hooks.hooked(tmp_path, "digests", **ENVIRONMENT)
    requests = [dict(request, rid=f"row-{number}") for number, request in enumerate(random_requests(1000, 1))]
    planted = dict(requests[0], rid=f"{scheduler_hooks.PLANTED}-0")
    with serve_apart(TARGET, DRAFT, tmp_path, environment=environment, **OVER, **{**FLAGS, **flags}) as apart:
        answers = apart.ask_all(requests, at_once=2 * MANY)
        apart.ask(**planted)
        apart.assert_idle()
        for log in (apart.prefill.log_text(), apart.decode.log_text()):
            assert "KV checksum mismatch" not in log and "KV checksum skipped" not in log
    assert len(answers) == 1000
    strays = scheduler_hooks.strays(tmp_path)
    assert strays.pop(planted["rid"]) == 2  # the target's, the draft's
    assert strays.keys() == {one["rid"] for one in requests}
    print(f"{sum(map(bool, strays.values()))} of {len(strays)} requests have rows that no forward left")
    assert not any(strays.values())


def test_retracted_requests_keep_their_context_in_sglangs_host_pool(apart, plain):
    requests = asked(40)
    expected = apart.ask_all(requests, at_once=MANY)
    decode = dict(
        environment={**OURS, **RETRACTING}, disaggregation_decode_retraction_backup="host_pool", **ON_THE_OTHER
    )
    with decode_beside(apart, TARGET, DRAFT, **decode) as retracting:
        answers = retracting.ask_all(requests, at_once=MANY)
        retracting.assert_idle()
        log = retracting.decode.log_text()
    assert "Testing retraction" in log
    assert_plain_decodings(plain, requests, answers)
    assert_as_many_steps(answers, expected, len(requests) // 2)


def test_retracted_requests_of_a_recurrent_target_keep_states_and_context(tmp_path):
    """SGLang keeps what has states in tensors of the host; its pool there has no place for them."""
    launch = LAUNCHES["Qwen3.5, Triton"]
    flags = {**launch.arguments, **FLAGS, "max_mamba_cache_size": 128}
    target, draft = pair_for(launch.target, FLAGS["dtype"])
    requests = [with_logprobs(turn) for turn in first_turns()]
    with serve(target, environment=ENVIRONMENT, **flags) as server:
        expected = [(request, server.generate(**request)) for request in requests]
    for request, answer in expected:
        scheduler_hooks.record(tmp_path, request["input_ids"], answer["output_ids"])
    environment = scheduler_hooks.hooked(tmp_path, "oracle", **ENVIRONMENT)  # a random draft has nothing accepted
    decode = dict(environment=RETRACTING, **ON_THE_OTHER)
    with serve_apart(target, draft, tmp_path, environment=environment, decode=decode, **OVER, **flags) as apart:
        answers = apart.ask_all(requests)
        apart.assert_idle()
        assert "Testing retraction" in apart.decode.log_text()
    assert_same_distributions(answers, expected)
    # Behind an almost tied token the oracle proposes another text; a step that accepts nothing has one token.
    assert accept_length(answers) > 1.2


@TWO_GPUS
@pytest.mark.parametrize(("prefilling", "decoding"), [(2, 1), (1, 2), (2, 2)])
def test_servers_of_other_numbers_of_ranks_output_plain_decodings(tmp_path, one, plain, prefilling, decoding):
    """Two ranks take both GPUs; one rank shares the second with them."""
    roles = {
        role: dict(tp_size=ranks, **(ON_THE_OTHER if ranks == 1 else {}))
        for role, ranks in (("prefill", prefilling), ("decode", decoding))
    }
    requests = asked(40)
    with serve_apart(TARGET, DRAFT, tmp_path, environment=OURS, **roles, **OVER, **FLAGS) as apart:
        answers = apart.ask_all(requests, at_once=MANY)
        apart.assert_idle()
    assert_plain_decodings(plain, requests, answers)
    assert_as_many_steps(answers, ask_at_once(one, requests, MANY), len(requests) // 4)
