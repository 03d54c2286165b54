"""Which states of a recurrent target a verify commits, and what ends start-up or gets the built-in worker."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_sglang import hooks
from dflash_sglang.startup.facts import StartupError
from dflash_sglang.verify import recurrent
from dflash_sglang.verify.recurrent import RecurrentStates
from tests.support.fakes import Algorithm, BuiltInWorker, arguments, built_in
from tests.unit.test_plugin import pair

__all__ = ["pair"]  # a fixture

BLOCK, GRID, SLOTS, LAYERS, REQUESTS = 8, 64, 24, 2, 6


def step_states(*shape: int) -> torch.Tensor:
    """[layers, batch rows + padding, steps, *shape], each step's state full of 1000 layer + 10 row + step."""
    layer, row, step = torch.meshgrid(
        torch.arange(LAYERS), torch.arange(REQUESTS + 1), torch.arange(BLOCK), indexing="ij"
    )
    values = (1000 * layer + 10 * row + step).float()
    return values.view(*values.shape, *(1 for _ in shape)).expand(*values.shape, *shape).clone()


def worker() -> SimpleNamespace:
    """A target worker with SGLang's own pool of states and attention backend, without anything around them."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.mem_cache.memory_pool import MambaPool

    caches = MambaPool.SpeculativeState(
        conv=[torch.full((LAYERS, SLOTS, 3, 2), -1.0)],
        temporal=torch.full((LAYERS, SLOTS, 2, 4, 4), -1.0),
        intermediate_ssm=step_states(2, 4, 4),
        intermediate_conv_window=[step_states(3, 2)],
    )
    pool = SimpleNamespace(
        req_to_token=torch.zeros(REQUESTS, 1),
        mamba_pool=SimpleNamespace(mamba_cache=caches),
        get_speculative_mamba2_params_all_layers=lambda: caches,
        size=REQUESTS,
        short_conv_pool=SimpleNamespace(conv_state=None),
        ngram_pool=SimpleNamespace(context=None),
    )
    backend = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
    backend.linear_attn_backend = SimpleNamespace(
        req_to_token_pool=pool, accept_lens_pool=None, _translate_mamba_indices=lambda indices: indices
    )
    runner = SimpleNamespace(
        model_config=None,
        model=None,
        device="cpu",
        page_size=1,
        attn_backend=backend,
        req_to_token_pool=pool,
    )
    return SimpleNamespace(model_runner=runner)


@pytest.fixture(scope="module", autouse=True)
def recurrent_target() -> Any:
    """SGLang takes the fake for a target with recurrent layers, and moves states without a GPU."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.speculative import spec_utils

    from dflash_sglang.platforms.cpu.recurrent import scatter_mamba_states_after_mtp_verify

    with pytest.MonkeyPatch.context() as patch:
        for module in (spec_utils, recurrent):
            patch.setattr(module, "mambaish_config", lambda config: object())
            patch.setattr(module, "mamba_track_grid", lambda page_size: GRID)
        patch.setattr(
            hybrid_linear_attn_backend,
            "scatter_mamba_states_after_mtp_verify",
            scatter_mamba_states_after_mtp_verify,
        )
        yield


def commit(prefix_lens: list[int], commit_lens: list[int], slots: list[int], track: list[int] | None) -> Any:
    """The pool after the commit of one verify; the batch's requests have their states in `slots`."""
    target = worker()
    backend = target.model_runner.attn_backend
    backend.linear_attn_backend.forward_metadata = SimpleNamespace(
        mamba_cache_indices=torch.tensor(slots + [0], dtype=torch.int32)  # a captured graph's padding
    )
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        seq_lens=torch.tensor(prefix_lens),
        req_pool_indices=torch.arange(len(slots)),
        mamba_track_indices=None if track is None else torch.tensor(track),
        tree_cache=SimpleNamespace(page_size=1),
    )
    RecurrentStates(target, BLOCK).commit(batch, torch.tensor(commit_lens, dtype=torch.int32), BLOCK)
    return target.model_runner.req_to_token_pool.mamba_pool.mamba_cache


def written(states: torch.Tensor) -> dict[int, tuple[int, int]]:
    """slot -> (batch row, step) of the state that it holds; the same in every layer and element."""
    found = {}
    for slot in range(SLOTS):
        value = states[0, slot].flatten()[0].item()
        for layer in range(LAYERS):
            expected = value if value < 0 else value + 1000 * layer
            assert (states[layer, slot] == expected).all()
        if value >= 0:
            found[slot] = divmod(int(value), 10)
    return found


def test_a_request_whose_states_are_freed_keeps_nothing_for_the_prefix_cache():
    caches = commit([60, 60], [8, 8], slots=[1, 2], track=[-1, 12])
    assert written(caches.temporal) == {1: (0, 7), 2: (1, 7), 12: (1, 3)}


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, BLOCK)), min_size=1, max_size=REQUESTS))
def test_any_batch_commits_its_prefixes_and_the_boundaries_that_they_reach(requests: list[tuple[int, int]]):
    prefix_lens, commit_lens = [prefix for prefix, _ in requests], [length for _, length in requests]
    slots, track = [2 + i for i in range(len(requests))], [12 + i for i in range(len(requests))]
    expected = {}
    for i, (prefix, length) in enumerate(requests):
        expected[slots[i]] = (i, length - 1)
        for step in range(length):
            if (prefix + step + 1) % GRID == 0:
                expected[track[i]] = (i, step)
    caches = commit(prefix_lens, commit_lens, slots, track)
    assert written(caches.temporal) == written(caches.conv[0]) == expected


def test_a_step_of_one_row_keeps_states_at_boundaries_and_moves_none(monkeypatch: pytest.MonkeyPatch):
    """The forward has moved them on: prefixes of 63 are at the boundary after it, but one request's is freed."""
    from dflash_sglang.platforms.cpu.recurrent import track_mamba_states_all_layers

    monkeypatch.setattr(recurrent, "replays", lambda runner: True)
    monkeypatch.setattr(recurrent, "track_mamba_states_all_layers", track_mamba_states_all_layers)
    target = worker()
    pool = target.model_runner.req_to_token_pool
    pool.get_mamba_indices = lambda requests: requests + 1
    states = pool.mamba_pool.mamba_cache
    for kept in (states.temporal, *states.conv):
        kept.copy_(torch.arange(SLOTS).view(1, SLOTS, *(1 for _ in kept.shape[2:])).expand_as(kept))
    batch = SimpleNamespace(
        seq_lens=torch.tensor([62, 63, 64, 63, 127]),
        req_pool_indices=torch.arange(5),
        mamba_track_indices=torch.tensor([11, 12, 13, -1, 15]),
    )
    RecurrentStates(target, BLOCK).commit(batch, torch.ones(5, dtype=torch.int32), 1)
    moved = {12: 2, 15: 5}
    for kept in (states.temporal, *states.conv):
        for slot in range(SLOTS):
            assert (kept[:, slot] == moved.get(slot, slot)).all(), slot


# ---- Widths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, BLOCK + 1))
def test_steps_of_a_width_keep_as_many_states_of_a_request_in_the_memory_of_the_widest_blocks(width):
    runner = worker().model_runner
    widest = runner.req_to_token_pool.mamba_pool.mamba_cache
    states = recurrent.states_of_width(runner, width)
    assert type(states) is type(widest)
    assert states.temporal is widest.temporal and states.conv is widest.conv
    assert states.intermediate_conv_window is widest.intermediate_conv_window
    kept = states.intermediate_ssm
    assert kept.shape == (LAYERS, REQUESTS + 1, width, 2, 4, 4) and kept.is_contiguous()
    assert kept.data_ptr() == widest.intermediate_ssm.data_ptr()


@pytest.mark.parametrize("width", [1, 3, BLOCK])
@pytest.mark.parametrize("pitch", ["of the buffer", "of the call", "of the block", "one row more"])
def test_a_kernel_whose_states_lie_at_another_distance_is_found(width, pitch):
    states = recurrent.states_of_width(worker().model_runner, width)
    rows_apart = {"of the buffer": states.intermediate_ssm.shape[2], "of the call": width, "of the block": BLOCK}
    apart = rows_apart.get(pitch, width + 1)

    def step() -> None:
        for layer in states.intermediate_ssm:
            rows = layer.view(-1, *layer.shape[2:])
            for request in range(2):
                rows[request * apart : request * apart + width] = 1.0

    assert recurrent.keeps_apart(states, 2, step) is (apart == width)
    assert recurrent.keeps_apart(states, 1, step), "one request alone has no distance"


# ---- Where states cannot be committed ------------------------------------------------------------------------


def test_a_target_without_recurrent_layers_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recurrent, "mambaish_config", lambda config: None)
    assert recurrent.states_of_width(worker().model_runner, BLOCK) is None
    assert RecurrentStates.from_target(worker(), BLOCK) is None


BUFFER, OVERLAP, CACHE = "extra buffer", "overlap", "prefix cache"


@pytest.mark.parametrize(
    ("has", "block", "expected"),
    [
        ((BUFFER, OVERLAP, CACHE), GRID // 2, None),
        ((CACHE,), BLOCK, None),
        ((OVERLAP,), BLOCK, None),
        ((OVERLAP, CACHE), BLOCK, "--disable-overlap-schedule=False: expected set: without a buffer"),
        (
            (BUFFER, OVERLAP, CACHE),
            GRID // 2 + 1,
            r"--mamba-track-interval=32: expected .* at least two blocks \(66 .*"
            "Set --mamba-track-interval to a multiple of 64 from 128 on.",
        ),
    ],
)
def test_boundaries_need_a_buffer_of_states_or_steps_one_after_the_other(monkeypatch, has, block, expected):
    mamba = SimpleNamespace(enable_mamba_extra_buffer=BUFFER in has, mamba_track_interval=32)
    schedule, memory = (
        dict(disable_overlap_schedule=OVERLAP not in has),
        dict(disable_radix_cache=CACHE not in has),
    )
    monkeypatch.setattr(recurrent, "get_exec", lambda: SimpleNamespace(mamba=mamba))
    monkeypatch.setattr(recurrent, "get_schedule", lambda: SimpleNamespace(**schedule))
    monkeypatch.setattr(recurrent, "get_memory", lambda: SimpleNamespace(**memory))
    if expected is None:
        assert isinstance(RecurrentStates.from_target(worker(), block), RecurrentStates)
        return
    with pytest.raises(StartupError, match=expected):
        RecurrentStates.from_target(worker(), block)


def test_what_commits_no_state_of_each_row_ends_start_up():
    for part, found in (
        ("attn_backend", "linear-attention backend='SimpleNamespace': expected one that keeps"),
        ("mamba_cache", "'a state pool without a state per verified row': expected one that"),
    ):
        target = worker()
        runner = target.model_runner
        setattr(runner if part == "attn_backend" else runner.req_to_token_pool.mamba_pool, part, SimpleNamespace())
        with pytest.raises(StartupError, match=found):
            RecurrentStates.from_target(target, BLOCK)


@pytest.fixture
def other_kind(pair, monkeypatch) -> Any:
    """Takes the model type of a target with recurrent layers that are no gated delta nets."""
    from dflash_sglang.startup import decisions

    monkeypatch.setattr(decisions, "mambaish_config", lambda config: object())
    monkeypatch.setattr(decisions, "hybrid_gdn_config", lambda config: None)
    return lambda model_type: setattr(pair.target.hf_config, "model_type", model_type)


@pytest.mark.matrix(
    target="Falcon-H1 and other recurrent layers", draft="z-lab", kv="any", outcome="built-in worker"
)
def test_recurrent_layers_of_another_kind_get_the_built_in_worker(pair, caplog, other_kind):
    other_kind("falcon_h1")
    with caplog.at_level(logging.WARNING, logger="dflash_sglang"):
        assert hooks.create_worker(built_in, Algorithm(), arguments(pair.plain)) is BuiltInWorker
    assert (
        "target config architectures=['Qwen3ForCausalLM']: recurrent layers of a kind that is not served"
        in caplog.text
    )


GATED_DELTA_NETS = None  # by the config, whatever the model type
GPU_ONLY = "KDA, for which SGLang has kernels on a GPU only"
OTHER_RANKS = "--attn-dp-size=2: data-parallel attention over recurrent layers other than gated"


@pytest.mark.matrix(target="GLM-5.3-Flash", draft="DFlash2", kv="any", outcome="built-in worker")
@pytest.mark.parametrize(
    ("model_type", "flags", "reason"),
    [
        *((kind, {}, None) for kind in ("lfm2", "lfm2_moe", "nemotron_h")),
        *((kind, dict(device="cuda"), None) for kind in ("lfm2", "lfm2_moe", "nemotron_h")),
        ("lfm2", dict(attn_dp_size=2), OTHER_RANKS),
        *((kind, dict(device="cuda"), None) for kind in ("kimi_k3", "kimi_linear")),
        *((kind, {}, GPU_ONLY) for kind in ("kimi_k3", "kimi_linear")),
        ("glm5_next", dict(device="cuda"), "KDA beside sparse attention that pools its index keys"),
        (GATED_DELTA_NETS, {}, None),
        (GATED_DELTA_NETS, dict(tp_size=2, attn_dp_size=2), None),
    ],
)  # fmt: skip
def test_kinds_of_recurrent_layers_that_are_ours(pair, monkeypatch, other_kind, model_type, flags, reason):
    from dflash_sglang.startup import decisions

    if model_type is GATED_DELTA_NETS:
        monkeypatch.setattr(decisions, "hybrid_gdn_config", lambda config: object())
    else:
        other_kind(model_type)
    found = decisions.check_startup(arguments(pair.plain, **flags))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.matrix(
    target="Qwen3.5",
    draft="z-lab",
    kv="replayed states",
    outcome="refused",
    message="--enable-linear-replayssm=True: expected unset with DFLASH",
)
@pytest.mark.parametrize("field", ["enable_linear_replayssm", "enable_linear_replayssm_spec"])
def test_replayed_states_are_refused(pair, field):
    flag = "--" + field.replace("_", "-")
    with pytest.raises(StartupError, match=f"{flag}=True: expected unset with DFLASH.*Remove {flag}, or serve"):
        hooks.create_worker(built_in, Algorithm(), arguments(pair.plain, **{field: True}))
