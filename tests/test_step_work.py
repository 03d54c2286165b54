"""The host's work in a decode step: nothing of it waits for the device or grows with the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_sglang.demo.server import Server
from tests import step_work
from tests.engines import serve
from tests.kits import DEVICE_ENVIRONMENT, DRAFT, ON_DEVICE, TARGET
from tests.step_work import Work
from tests.tiny import make_pair

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


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_makes_the_same_calls_for_one_request_and_for_many_and_waits_for_nothing(tmp_path, overlap):
    target, draft = make_pair(tmp_path)
    environment = step_work.recorded(tmp_path)
    with serve(
        target,
        draft,
        environment=environment,
        disable_overlap_schedule=not overlap,
        max_running_requests=48,
        min_free_slots_delay=1,
        random_seed=1,
    ) as server:
        for sampling, sizes in ((GREEDY, (1, 32)), (SAMPLED, (2, 48))):
            for requests in sizes:
                ask(server, requests, **sampling)
            few, many = (typical(tmp_path, requests) for requests in sizes)
            assert few.waits == many.waits == []
            assert few.loops == many.loops == LOOPS
            assert many.calls == few.calls
            assert many.operators == few.operators
    assert few.calls["rejection_sample"] == 1
    assert typical(tmp_path, 32).calls["accept"] == 1


@pytest.mark.gpu
@pytest.mark.slow
def test_torch_sees_no_wait_for_the_gpu_in_a_step(tmp_path):
    environment = {**step_work.recorded(tmp_path, synchronising=True), **DEVICE_ENVIRONMENT}
    with serve(TARGET, DRAFT, environment=environment, cuda_graph_max_bs_decode=8, **ON_DEVICE) as server:
        for requests, sampling in ((1, GREEDY), (8, GREEDY), (7, SAMPLED)):
            ask(server, requests, **sampling)
            assert typical(tmp_path, requests).waits == []
