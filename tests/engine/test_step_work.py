"""The host's work in a step: none of it waits for the device, and a decode step's does not grow with the batch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.bench import profile
from dflash_sglang.demo.progress import Progress
from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from tests.support import recorded_graphs, step_moves, step_work
from tests.support.engines import serve
from tests.support.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from tests.support.step_moves import Moves
from tests.support.step_work import Work
from tests.support.tiny import make_pair

VOCAB = 20_480
GREEDY: dict[str, Any] = dict(temperature=0)
SAMPLED: dict[str, Any] = dict(temperature=0.8, top_p=0.9)
# One pass over the requests each: their lengths, which SGLang keeps in them, and a counter that SGLang wants.
LOOPS = ["SlotReservation.reserve", "DFlashDraftInput.prepare_for_decode"]


def ask(server: Server, requests: int, new_tokens: int = 24, **sampling: Any) -> None:
    prompts = [[4 + i, 9, 70 + i] for i in range(requests)]
    parameters = {"max_new_tokens": new_tokens, "ignore_eos": True, **sampling}
    server.generate(input_ids=prompts, sampling_params=parameters)


def typical(directory: Path, requests: int) -> Work:
    """The last step of so many requests, when nothing is new any more."""
    return step_work.steps(directory, requests)[-1]


def ending_late(server: Server, directory: Path, stop_tokens: int) -> tuple[Any, ...]:
    """What a step does on the host for a request that names so many tokens, which may not end it yet."""
    ask(server, 1, min_new_tokens=24, stop_token_ids=list(range(10, 10 + stop_tokens)), **GREEDY)
    work = typical(directory, 1)
    return work.calls, work.operators, work.from_host


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("captured", [True, pytest.param(False, marks=pytest.mark.release)])
def test_a_step_makes_the_same_calls_for_one_request_and_for_many_and_waits_for_nothing(tmp_path, captured):
    """With graphs, overlap scheduling and copies, and without; whatever number of stop tokens a request names."""
    target, draft = make_pair(tmp_path, target=dict(vocab_size=VOCAB), draft=dict(vocab_size=VOCAB))
    for part_of_tokenizer in TARGET.glob("tokenizer*"):  # without one SGLang refuses min_new_tokens
        shutil.copy(part_of_tokenizer, target)
    environment = step_work.recorded(tmp_path)
    if captured:
        environment |= recorded_graphs.recording(tmp_path, "", "support.step_work")
        environment[CONFIG_ENV] = json.dumps({"copy": "block"})
    with serve(
        target,
        draft,
        environment=environment,
        disable_overlap_schedule=not captured,
        max_running_requests=16,
        min_free_slots_delay=1,
        random_seed=1,
        skip_tokenizer_init=None,
    ) as server:
        for sampling in (GREEDY, SAMPLED):
            for requests in (1, 16):
                ask(server, requests, **sampling)
            one, many = (typical(tmp_path, requests) for requests in (1, 16))
            assert one.waits == many.waits == []
            assert one.loops == many.loops == LOOPS
            assert many.calls == one.calls
            assert many.operators == one.operators
            assert ("rejection_sample" in one.calls) == (sampling is SAMPLED)
        together = [prefill for prefill in step_work.prefills(tmp_path) if prefill.requests > 1]
        assert together and not any(prefill.waits for prefill in together), together
        few, many = (ending_late(server, tmp_path, stop_tokens) for stop_tokens in (10, 20_000))
        assert few == many
    assert not captured or {replay.requests for replay in recorded_graphs.replays(tmp_path)} >= {1, 16}


@pytest.mark.full
@pytest.mark.slow
def test_a_greedy_step_in_graphs_gathers_and_stages_nothing_and_copies_to_the_host_once(tmp_path):
    target, draft = make_pair(tmp_path)
    # On a CPU copies are looked for by operations that gather. They are one more copy to the host.
    environment = recorded_graphs.recording(tmp_path, "", "support.step_moves", **{CONFIG_ENV: '{"copy": "off"}'})
    with serve(
        target, draft, environment=environment, max_running_requests=16, min_free_slots_delay=1, random_seed=1
    ) as server:
        for requests in (1, 5, 16):
            ask(server, requests, **GREEDY)
            assert step_moves.steps(tmp_path, requests)[-1] == Moves(requests, gathers=0, staged=0, to_host=1)
    assert {replay.role for replay in recorded_graphs.replays(tmp_path)} == {"draft", "target"}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 8])
def test_a_greedy_step_has_at_most_eight_launches_outside_of_its_graphs(tmp_path, requests):
    graphs = dict(cuda_graph_max_bs_decode=8, max_running_requests=8, min_free_slots_delay=1)
    environment = {**DEVICE_ENVIRONMENT, CONFIG_ENV: '{"copy": "off"}'}
    with serve(TARGET, DRAFT, environment=environment, attention_backend="fa3", **graphs, **ON_DEVICE) as server:
        ask(server, requests, new_tokens=64, **GREEDY)
        asked = [{"input_ids": [4 + i, 9, 70 + i]} for i in range(requests)]
        step = profile.take_apart(server, "ours", asked, tmp_path, Progress(sys.stdout))
    assert step["kernels"]["draft"] > 10 and step["kernels"]["outside"] <= 8, step["outside_kernels"]


@pytest.mark.gpu
@pytest.mark.slow
def test_torch_sees_no_wait_for_the_gpu_in_a_step(tmp_path):
    environment = {
        **step_work.recorded(tmp_path, synchronising=True),
        **DEVICE_ENVIRONMENT,
        CONFIG_ENV: json.dumps({"copy": "block"}),
    }
    graphs = dict(cuda_graph_max_bs_decode=8, max_running_requests=8, min_free_slots_delay=1)
    with serve(TARGET, DRAFT, environment=environment, **graphs, **ON_DEVICE) as server:
        for requests, sampling in ((1, GREEDY), (8, GREEDY), (7, SAMPLED)):
            ask(server, requests, new_tokens=64, **sampling)
            assert typical(tmp_path, requests).waits == []
        assert {wait for prefill in step_work.prefills(tmp_path) for wait in prefill.waits} == set()
