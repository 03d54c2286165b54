"""Prefixes from the host on a GPU: pinned memory, copy streams, graphs, bfloat16; `test_host_cache` on the CPU.

Each prompt is asked cold, evicted to the host by the others, and asked again. The draft's keys and values of its
first tokens must then be those of the cold run, bit by bit. Outputs in bfloat16 may part where two tokens are
almost tied, because the rest of a prompt is prefilled in another shape.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine.test_host_cache import LENGTH, ON_HOST, checkpoints, prompts_of
from tests.engine.test_recurrent_serving import GRID
from tests.gpu.test_recurrent_gpu import TRITON, assert_same_distributions, with_logprobs
from tests.support import scheduler_hooks
from tests.support.engines import greedy_params, serve
from tests.support.kits import DEVICE_ENVIRONMENT, ON_DEVICE
from tests.zoo.member import pair_for

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

WHOLE = LENGTH // GRID * GRID  # tokens of a prompt that come back at any page size and grid
FLAGS: dict[str, Any] = dict(cuda_graph_max_bs_decode=4, **ON_HOST, **ON_DEVICE)
PAIR = "the trained pair"
# hicache_io_backend "kernel" is SGLang's default.
LAUNCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "the pair": (PAIR, dict()),
    "the pair, direct copies, pages of 64": (PAIR, dict(hicache_io_backend="direct", page_size=64)),
    "the pair, written back at eviction": (PAIR, dict(hicache_write_policy="write_back")),
    "Qwen3.5": ("Qwen3.5, wide heads", dict(mamba_track_interval=GRID, **TRITON)),
}


def activate() -> None:
    """Entry point in a scheduler: writes down, once per request, the draft's rows of its first tokens."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Not earlier: rehearsed steps have no requests of their own.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", _note_rows, HookType.BEFORE)


def _note_rows(scheduler: Any) -> None:
    from dflash_sglang.drafting.proposer import Proposer

    propose, seen = Proposer.propose, set()

    def noting(self: Any, batch: Any, block: Any) -> Any:
        (req,) = batch.reqs
        if req.rid not in seen and len(req.origin_input_ids) >= WHOLE:
            seen.add(req.rid)
            slots = batch.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :WHOLE].long()
            pool = self._runner.token_to_kv_pool
            rows = torch.stack([buffer[slots] for buffer in (*pool.k_buffer, *pool.v_buffer)])
            told = hashlib.sha256(rows.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
            scheduler_hooks.note("rows.jsonl", told)
        return propose(self, batch, block)

    Proposer.propose = noting


@dataclass
class Answered:
    target: str
    cold: list[dict[str, Any]]
    warm: list[dict[str, Any]]
    asked: list[dict[str, Any]]
    rows: list[str]  # of the draft, cold and then warm


@pytest.fixture(scope="module", params=LAUNCHES)
def answered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    target, flags = LAUNCHES[request.param]
    directory = tmp_path_factory.mktemp("rows")
    environment = scheduler_hooks.hooked(directory, "", "gpu.test_host_cache_gpu", **DEVICE_ENVIRONMENT)
    models = checkpoints(target) if target == PAIR else pair_for(target, FLAGS["dtype"])
    asked = [
        with_logprobs(dict(input_ids=prompt, sampling_params=greedy_params(60))) for prompt in prompts_of(target)
    ]
    with serve(*models, environment=environment, **{**FLAGS, **flags}) as server:
        try:
            cold, warm = ([server.generate(**one) for one in asked] for _ in ("cold", "warm"))
        finally:
            print(server.log_tail(60))  # shown with a failure
    rows = scheduler_hooks.noted(directory, "rows.jsonl")
    return Answered(target, cold, warm, asked, rows[-2 * len(asked) :])


def test_what_the_device_evicted_comes_back_from_the_host(answered):
    for cold, warm in zip(answered.cold, answered.warm, strict=True):
        assert cold["meta_info"]["cached_tokens"] < 16  # prompts may begin alike
        details = warm["meta_info"]["cached_tokens_details"]
        assert details["device"] == 0 and details["host"] >= WHOLE


def test_the_drafts_rows_are_those_of_the_cold_run_bit_by_bit(answered):
    half = len(answered.asked)
    assert len(answered.rows) == 2 * half
    assert len(set(answered.rows)) == half
    assert answered.rows[half:] == answered.rows[:half]


def test_output_and_accept_length_are_those_of_a_cold_run(answered):
    """Steps are compared where outputs are equal: behind an almost tied token it is another text."""
    assert_same_distributions(answered.warm, list(zip(answered.asked, answered.cold, strict=True)))
    if answered.target == PAIR:
        steps = [
            tuple(answer["meta_info"]["spec_verify_ct"] for answer in both)
            for both in zip(answered.cold, answered.warm, strict=True)
            if both[0]["output_ids"] == both[1]["output_ids"]
        ]
        print(f"verify steps of equal outputs, cold and warm: {steps}")
        assert steps
        assert all(abs(cold - warm) <= 2 for cold, warm in steps)
        assert 60 * len(steps) > 3 * sum(warm for _, warm in steps)
