"""What start-up runs so that first requests run nothing for the first time, and what is left of it: nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.demo.server import Server
from dflash_sglang.settings.plugin_config import CONFIG_ENV
from dflash_sglang.settings.width import DEFAULT_TREES
from dflash_sglang.startup.copying import CHAINS
from dflash_sglang.warmup.dummy_batches import GREEDY
from dflash_sglang.warmup.first_requests import PROMPTS_ON_GPU, SAMPLINGS, SHORT, prompts
from tests.support import scheduler_hooks
from tests.support.engines import greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE
from tests.zoo.member import pair
from training.pair import pair_directories

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
SAMPLED = dict(temperature=1.0, ignore_eos=True)
REQUESTS: tuple[dict[str, Any], ...] = (
    greedy_params(20),
    dict(**SAMPLED, max_new_tokens=20),
    dict(**SAMPLED, max_new_tokens=20, top_k=20, top_p=0.9),
    dict(**SAMPLED, max_new_tokens=20, top_k=20, top_p=0.9, min_p=0.05),
)
# What else requests ask of the logits; the last fields are those of the request.
KINDS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (dict(frequency_penalty=0.5, presence_penalty=0.2), {}),
    (dict(repetition_penalty=1.2), {}),
    (dict(logit_bias={"11": 2.0}), {}),
    ({}, dict(return_logprob=True, top_logprobs_num=2)),
)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "overlap": dict(),
    "chunks_of_8": dict(chunked_prefill_size=8),
}


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1 << 20, [2048, 1000, 512, 256, 128, 64, 37, 16, 1]),
        (600, [600, 512, 256, 128, 64, 37, 16, 1]),
        (16, [16, 1]),
    ],
)
def test_prompts_are_no_longer_than_a_server_takes_and_the_longest_comes_first(most, expected):
    assert prompts(PROMPTS_ON_GPU, most) == expected


@pytest.mark.parametrize("backed", [True, False])
def test_rehearsed_contexts_are_read_from_slots_that_have_memory(
    backed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLANG_ENABLE_POST_CAPTURE_KV_SIZING gives memory to all others after start-up."""
    from dflash_sglang.warmup import dummy_batches

    monkeypatch.setattr(dummy_batches, "mambaish_config", lambda config: None)
    table = torch.zeros(4, 32, dtype=torch.int32)
    runner: Any = SimpleNamespace(
        model_config=None,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=SimpleNamespace(post_capture_active=not backed),
        device="cpu",
        max_total_num_tokens=40,
    )
    nothing: Any = None
    reservation: Any = SimpleNamespace(page_size=4)
    rehearsal = dummy_batches.Rehearsal(runner, reservation, nothing)
    with rehearsal._contexts(2, 16):
        slots = table[1:3, :16].flatten().tolist()
        assert slots == (list(range(4, 36)) if backed else [0] * 32)
    assert not table.any()


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(name of the configuration, server that had no request, directory of its records)"""
    records = tmp_path_factory.mktemp("records")
    arguments = dict(skip_server_warmup=True, **CONFIGURATIONS[request.param])
    with serve(TARGET, DRAFT, environment=watching(records), **arguments) as server:
        yield request.param, server, records
        print(server.log_tail(40))


def watching(records: Path, **settings: Any) -> dict[str, str]:
    return scheduler_hooks.hooked(records, "rehearsals,firsts", **{CONFIG_ENV: json.dumps(settings)})


def rehearsed(records: Path) -> dict[str, Any]:
    """There once nothing was found changed."""
    ran, _ = json.loads((records / "rehearsed").read_text())
    return ran


def firsts(records: Path) -> list[tuple[str, list[str], list[Any]]]:
    """(forward mode, modules imported since start-up, buffers made since) of each forward."""
    return [tuple(row) for row in scheduler_hooks.noted(records, "firsts.jsonl")]


def generate(server: Server, sampling: dict[str, Any], tokens: int = 60, **fields: Any) -> list[int]:
    return server.generate(input_ids=list(range(5, 5 + tokens)), sampling_params=sampling, **fields)["output_ids"]


@pytest.mark.slow
@pytest.mark.full
def test_start_up_prefills_and_decodes_in_every_sampling_and_leaves_no_trace(served):
    name, _, records = served
    ran, samplings = rehearsed(records), [dict(sampling) for sampling in SAMPLINGS]
    tokens = 8 if name == "chunks_of_8" else SHORT
    assert ran == dict(
        seconds=[],
        prefill=[[tokens, sampling] for sampling in samplings],
        step=[[tokens, sampling, 16] for sampling in samplings],
    )


@pytest.mark.slow
@pytest.mark.full
def test_first_requests_import_nothing_of_this_package_and_make_no_buffer(served):
    _, server, records = served
    for sampling in REQUESTS:
        assert len(generate(server, sampling)) == 20
    seen = firsts(records)
    assert {"EXTEND", "DECODE"} <= {mode for mode, *_ in seen}
    assert all(modules == [] == buffers for _, modules, buffers in seen), seen


@pytest.mark.slow
@pytest.mark.full
def test_no_kind_of_request_makes_a_buffer_or_lets_one_grow(served):
    """Nor many of them at once: on a GPU it would be memory that the KV pools do not leave."""
    _, server, records = served
    asked = [
        (dict(sampling, **more), fields) for more, fields in KINDS for sampling in (REQUESTS[0], REQUESTS[-1])
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        for _ in pool.map(lambda one: generate(server, one[0], **one[1]), asked):
            pass
    taken = {where.rpartition(".")[2]: size for where, size in json.loads((records / "taken.json").read_text())}
    rows, vocabulary = 49, 320  # of SGLang's 48 requests
    assert taken["_counts"] == 4 * rows * vocabulary and taken["_ends"] == rows * vocabulary
    assert {"_packed", "_max_commit", "_last"} <= set(taken), "outcomes, limits, what processors are told"
    made = {where for _, _, buffers in firsts(records) for where in map(tuple, buffers)}
    assert made == set()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("width", ["block", {"widths": [1, 4, 16]}], ids=["block", "widths"])
def test_requests_launch_no_kernel_of_triton_that_start_up_has_not(tmp_path, width):
    """SGLang's warm-up request among them."""
    records = tmp_path / "records"
    records.mkdir()
    environment = {**watching(records, width=width), **DEVICE_ENVIRONMENT}
    environment[scheduler_hooks.HOOKS_ENV] = "firsts"
    graphs = dict(cuda_graph_max_bs_decode=8, max_running_requests=8, min_free_slots_delay=1)
    with serve(TARGET, DRAFT, environment=environment, **graphs, **ON_DEVICE) as server:
        for requests, length, sampling in itertools.product((1, 2, 3, 8), (1, 40, 300), REQUESTS):
            prompts = [[5 + i] * (length + i) for i in range(requests)]
            server.generate(input_ids=prompts, sampling_params={**sampling, "max_new_tokens": 33 + requests})
        launched = scheduler_hooks.noted(records, "kernels.jsonl")
        assert [name for when, name in launched if when == "start-up"]
        late = [name for when, name in launched if when == "request"]
        assert not late, f"first launched by a request: {late}"


@pytest.mark.slow
@pytest.mark.full
def test_steps_of_every_served_width_are_rehearsed(tmp_path):
    records = tmp_path / "records"
    records.mkdir()
    environment = watching(records, width={"widths": [1, 4, 16]})
    with serve(TARGET, DRAFT, environment=environment, skip_server_warmup=True) as server:
        ran = rehearsed(records)
        shapes = 4 + len(DEFAULT_TREES)  # a ragged one, too
        # Greedy requests alone verify more rows than a block.
        assert len(ran["step"]) == shapes * len(SAMPLINGS) + len(CHAINS) and len(ran["seconds"]) >= shapes - 1
        generate(server, REQUESTS[0])
        assert not [first for first in firsts(records) if first[1] or first[2]]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["extra_buffer", "no_buffer"])
def test_recurrent_targets_rehearse_steps_of_every_width_and_leave_no_states(tmp_path, strategy):
    records = tmp_path / "records"
    records.mkdir()
    environment = watching(records, width={"widths": [1, 4, 8]})
    arguments = dict(
        skip_server_warmup=True,
        max_mamba_cache_size=64,
        mamba_radix_cache_strategy=strategy,
        disable_overlap_schedule=strategy == "no_buffer",
    )
    with serve(*pair("Qwen3.5"), environment=environment, **arguments) as server:
        ran = rehearsed(records)
        alone, together = ran["prefill"][: len(SAMPLINGS)], ran["prefill"][len(SAMPLINGS) :]
        if strategy == "no_buffer":
            assert [row[2:] for row in alone] == [[]] * len(SAMPLINGS) and together == [[37, dict(GREEDY), 2]]
        else:  # a prefix cache keeps states of every 64 tokens
            assert [row[2:] for row in alone] == [[[-1]]] * len(SAMPLINGS)
            assert together == [[tokens, dict(GREEDY), 2, [tokens] * 2] for tokens in (64, 96)]
        assert len(ran["step"]) == 3 * len(SAMPLINGS)
        generate(server, REQUESTS[0])
        assert not [first for first in firsts(records) if first[1] or first[2]]
