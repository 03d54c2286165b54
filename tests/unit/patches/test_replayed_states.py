"""Pools of recurrent states that keep rows: their sizes by SGLang's own arithmetic, and where they are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.patches import replayed_states
from tests.support.fakes import Settings

LAYERS, HEADS, DIM, KEY_HEADS = 48, 48, 128, 16  # of Qwen3.5-27B
BLOCK, GB = 16, 2**30


def params() -> Any:
    """SGLang's of gated delta nets with 16-bit activations and float32 states."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=HEADS * DIM, n_groups=KEY_HEADS, num_heads=HEADS, head_dim=DIM,
        state_size=DIM, conv_kernel=4,
    )  # fmt: skip
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return Mamba2CacheParams(shape=shape, layers=list(range(LAYERS)), dtype=dtype)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Default settings of a launch with this block, where SGLang's arithmetic and ours find them."""
    from sglang.srt.mem_cache import kv_cache_configurator

    mamba = Settings(
        enable_linear_replayssm_spec=False, linear_replayssm_cache_len=16, enable_mamba_extra_buffer=True,
        enable_mamba_extra_buffer_lazy=False, linear_attn_backend="triton", linear_attn_decode_backend=None,
        linear_attn_verify_backend=None,
    )  # fmt: skip
    memory = Settings(disable_radix_cache=False, enable_unified_memory=False, enable_page_major_kv_layout=False)
    schedule = Settings(
        max_mamba_cache_size=None, max_running_requests=48, mamba_full_memory_ratio=0.9,
        disable_overlap_schedule=False,
    )  # fmt: skip
    found = dict(
        get_exec=lambda: SimpleNamespace(mamba=mamba),
        get_memory=lambda: memory,
        get_schedule=lambda: schedule,
        get_spec=lambda: Settings(speculative_num_draft_tokens=BLOCK),
        get_context=lambda: SimpleNamespace(override=lambda reason, **values: vars(schedule).update(values)),
    )
    for module in (kv_cache_configurator, replayed_states):
        for name, value in found.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(kv_cache_configurator, "_pd_prefill_skips_mamba_spec_state", lambda: False)
    monkeypatch.setattr(replayed_states, "hybrid_gdn_config", lambda config: object())
    return SimpleNamespace(mamba=mamba, memory=memory, schedule=schedule)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `install` replaces is put back."""
    for owner, name in (
        (replayed_states.KVCacheConfigurator, "_handle_max_mamba_cache"),
        (replayed_states.HybridReqToTokenPool, "mamba_pool_cls"),
        (replayed_states.gdn_replayssm_spec_fold, "commit_gdn_replayssm_fold_all_layers"),
        (replayed_states.fused_sigmoid_gating_recurrent, "_select_recurrent_launch_config"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def sized(settings: Any, gigabytes: float) -> tuple[int, int, float]:
    """Slots, running requests, and GB that are left for KV."""

    class Configurator(replayed_states.KVCacheConfigurator):  # with attributes of any kind
        fused_entry_bytes = staticmethod(lambda name: None)

    configurator: Any = object.__new__(Configurator)
    fields = dict(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params()), hybrid_gdn_config=object(),
        hybrid_kda_config=None, pp_size=1, attn_dp_size=1, extra_mamba_cache_bytes_per_req=0,
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
    )  # fmt: skip
    for name, value in fields.items():
        setattr(configurator, name, value)
    settings.schedule.max_mamba_cache_size = None
    left = configurator._handle_max_mamba_cache(gigabytes)
    assert configurator.extra_mamba_cache_bytes_per_req == 0
    assert not settings.mamba.enable_linear_replayssm_spec and settings.mamba.linear_replayssm_cache_len == 16
    slots = settings.schedule.max_mamba_cache_size
    return slots, min(48, slots // configurator._calculate_mamba_ratio()), left


def test_a_verify_that_keeps_rows_has_the_launch_of_one_that_keeps_states(settings, sglang, monkeypatch):
    kernel = replayed_states.fused_sigmoid_gating_recurrent
    assert replayed_states.install(SimpleNamespace(model_config=None))
    launches = ((True, 64, False, 4), (True, 65, False, 32), (True, 1, True, 32), (False, 1, False, 32))
    for hopper, requests, kda, tile in launches:
        monkeypatch.setattr(kernel, "_is_sm90", hopper)
        launch = kernel._select_recurrent_launch_config(
            requests, 16, 32, 128, 128, kda, target_verify=False, cache_steps=None
        )
        assert launch == (tile, 1), (hopper, requests, kda)


def test_a_27b_on_one_h200_runs_four_times_the_requests(settings, sglang):
    """66 GB beside bf16 weights, default flags. docs/results/step.md has a measured launch."""
    kept_slots, kept_requests, kept_left = sized(settings, 66.0)
    assert replayed_states.install(SimpleNamespace(model_config=None))
    slots, requests, left = sized(settings, 66.0)
    assert (kept_slots, kept_requests) == (47, 9)
    assert (slots, requests) == (189, 37)
    assert abs(left - kept_left) < 2.0  # as much as before is left for KV
    # All that SGLang and we allocate for slots and for 37 requests is within what was taken.
    conv = params().mamba_cache_per_req - LAYERS * HEADS * DIM * DIM * 4
    rows = replayed_states.RowShapes.from_params(params(), BLOCK).nbytes * LAYERS
    allocated = (slots + 1) * (params().mamba_cache_per_req + rows) + (requests + 1) * conv * (BLOCK + 2) // 3
    assert 0.95 < allocated / GB / (66.0 - left) <= 1.0


def test_states_of_rows_are_kept_where_something_else_verifies_or_has_states_and_where_pools_lie_otherwise(
    settings, sglang, monkeypatch
):
    def replays() -> bool:
        return replayed_states.install(SimpleNamespace(model_config=None))

    for group, field, value in (
        ("mamba", "linear_attn_verify_backend", "flashinfer"),
        ("mamba", "linear_attn_decode_backend", "flashinfer"),
        ("mamba", "linear_attn_backend", "flashinfer"),
        ("memory", "enable_unified_memory", True),
        ("memory", "enable_page_major_kv_layout", True),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(getattr(settings, group), field, value)
            assert not replays(), field
    # Layers beside the recurrent ones, whose states SGLang rolls on where it commits kept ones; other kinds.
    for config in (SimpleNamespace(ple_layer_ids=[1, 2]), None):
        with monkeypatch.context() as changed:
            changed.setattr(replayed_states, "hybrid_gdn_config", lambda _, config=config: config)
            assert not replays(), config
    assert replayed_states.HybridReqToTokenPool.mamba_pool_cls is not replayed_states.ReplayPool
    assert replays()


def test_a_step_of_one_row_runs_the_decode_of_the_kernel_that_verifies(monkeypatch):
    """Of other decode kernels some write to the last slot for padding."""
    calls = []

    def verifier(*rows: Any, **arguments: Any) -> str:
        calls.append((rows, arguments))
        return "out"

    dispatcher = SimpleNamespace(verify_kernel=SimpleNamespace(decode=verifier), decode=None)
    backend = SimpleNamespace(kernel_dispatcher=dispatcher, _replayssm_fold_target_verify=None)
    replayed_states.move_states_in_forward(SimpleNamespace(linear_attn_backend=backend))
    layer = SimpleNamespace(A_log="A", dt_bias="dt")
    of_batch = dict(ssm_states="s", cache_indices="i", query_start_loc="l", layer_cache=None)
    out = backend._replayssm_fold_target_verify(layer=layer, query=1, key=2, value=3, a=4, b=5, **of_batch)
    expected = dict(A_log="A", dt_bias="dt", ssm_states="s", cache_indices="i", query_start_loc="l")
    assert out == "out" and calls == [((1, 2, 3, 4, 5), expected)]
