"""Tokens that fit beside a draft in rings, by SGLang's own arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang.kernels.context.rings import RingShape
from dflash_sglang.patches import draft_pool

GB = 2**30
OF_DRAFT = 5 * 2 * 8 * 128 * 2  # bytes a token: five layers of 8 heads of 128 for keys and for values, bfloat16
SHAPE = RingShape.fitting(2048, 1, 16)


class Configurator(draft_pool.KVCacheConfigurator):
    """Of a target with the shapes of Qwen3.8-27B: 16 layers of full attention, 4 heads of 256 for keys and values,
    64 KiB a token."""

    fused_entry_bytes = staticmethod(lambda name: None)
    _calculate_mamba_ratio = staticmethod(lambda: 5)


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Any:
    from sglang.srt.layers.cp import utils
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor import pool_configurator

    schedule = SimpleNamespace(
        max_running_requests=48, max_mamba_cache_size=240, max_total_tokens=None, page_size=1
    )
    parallel = SimpleNamespace(attn_dcp_size=1, attn_tp_size=1, pp_size=1, attn_cp_size=1)
    memory = SimpleNamespace(enable_hisparse=False, enable_unified_memory=False)
    full = SimpleNamespace(full_attention_layer_ids=list(range(3, 64, 4)))
    for module in (pool_configurator, kv_cache_configurator, draft_pool):
        for name, value in (("get_schedule", schedule), ("get_parallel", parallel), ("get_memory", memory)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda value=value: value)
    monkeypatch.setattr(pool_configurator, "mambaish_config", lambda config: full)
    monkeypatch.setattr(pool_configurator, "compute_page_shard_scratch_bytes", lambda *_, **__: 0)
    monkeypatch.setattr(pool_configurator, "is_minimax_sparse", lambda config: False)
    monkeypatch.setattr(pool_configurator, "is_deepseek_v4", lambda config: False)
    monkeypatch.setattr(pool_configurator.DefaultPoolConfigurator, "_compute_qsa_cell_size", lambda *_, **__: 0)
    monkeypatch.setattr(utils, "get_glm_dsa_layer_split_effective_num_layers", lambda runner, layers: layers)
    owner = draft_pool.KVCacheConfigurator
    monkeypatch.setattr(owner, "config_from_budget", owner.config_from_budget)  # put back afterwards
    return schedule


def configurator(**changes: Any) -> Any:
    made = object.__new__(Configurator)
    config = SimpleNamespace(
        hf_config=None, head_dim=256, v_head_dim=256, get_num_kv_heads=lambda *_: 4, context_len=262144
    )
    algorithm = dict(is_dflash_family=lambda: True, is_eagle=lambda: False, is_standalone=lambda: False)
    fields = dict(
        model_config=config, mambaish_config=object(), kv_cache_dtype=torch.bfloat16, kv_cache_dtype_str="auto",
        layer_info=SimpleNamespace(start_layer=0, end_layer=64), pp_size=1, attn_dp_size=1, page_size=1,
        use_mla_backend=False, is_hybrid_swa=False, is_draft_worker=False, post_capture_kv_active=False,
        server_args=SimpleNamespace(enable_hisparse=False), spec_algorithm=SimpleNamespace(**algorithm),
        spec_aux_config=SimpleNamespace(dflash_draft_num_layers=5), dflash_draft_cell_size_per_token=OF_DRAFT,
    )  # fmt: skip
    for name, value in (fields | changes).items():
        setattr(made, name, value)
    return made


def tokens(budget: float, **changes: Any) -> int:
    return configurator(**changes).config_from_budget(int(budget * GB)).max_total_num_tokens


def test_a_27b_with_48_requests_keeps_a_fifth_more_tokens(schedule):
    """36.1 GiB for both, as SGLang's pull request 40665 reports; 22 % more."""
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

    whole = tokens(36.1)
    pool = draft_pool.install(SHAPE)
    bounded = tokens(36.1)
    assert whole == int(36.1 * GB) // (64 * 1024 + OF_DRAFT) == 450_638
    assert pool.rings == 64 and pool.slots == 64 * 2080
    assert bounded * (64 * 1024 + 1) + pool.slots * OF_DRAFT <= 36.1 * GB
    assert 1.22 * whole < bounded == 549_854
    config = MemoryPoolConfig(max_total_num_tokens=bounded, max_running_requests=48)
    assert pool.config_of_draft(config) == MemoryPoolConfig(64 * 2080, 48)
    assert draft_pool.with_fields is not None and config.max_total_num_tokens == bounded


def test_there_is_a_ring_for_each_request_that_can_run_and_for_tails(schedule):
    """slots: of recurrent states, five for a running request."""
    pool = draft_pool.install(SHAPE)
    for requests, slots, rings in ((16, 80, 32), (48, 240, 64), (120, 600, 150), (48, 50, 26)):
        schedule.max_running_requests, schedule.max_mamba_cache_size = requests, slots
        tokens(36.1)
        assert pool.rings == rings


@pytest.mark.parametrize(
    "budget, changes, why",
    [
        (5.0, {}, "64 rings of 2080 tokens would not be smaller"),
        (36.1, dict(post_capture_kv_active=True), "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING sizes the pools after"),
        (36.1, dict(dflash_draft_cell_size_per_token=None), "SGLang cannot tell the draft's bytes of a token"),
    ],
)
def test_the_whole_pool_stays_where_rings_gain_nothing_or_cannot_be_sized(schedule, budget, changes, why):
    whole = tokens(budget, **changes)
    pool = draft_pool.install(SHAPE)
    assert tokens(budget, **changes) == whole
    assert pool.slots is None and pool.why_whole is not None and pool.why_whole.startswith(why)
    config = object()
    assert pool.config_of_draft(config) is config


OF_LAYER = 2 * 8 * 128 * 2  # bytes a token: 8 heads of 128 for keys and for values, bfloat16
FULL, SLIDING = 12, 33  # layers of Step-3.5-Flash


@pytest.mark.parametrize(
    "full, sliding, ratio, fixed, gain",
    [(0, 3, 0.8, None, 1.0147), (0, 3, 0.1, None, 1.173), (1, 2, 0.1, None, 1.109), (0, 3, 0.8, 5000, 1.2463)],
)
def test_layers_at_sliding_slots_cost_these_and_the_budget_holds(
    schedule, monkeypatch, full, sliding, ratio, fixed, gain
):
    """fixed: sliding slots, where SGLang takes as many as the running requests need."""
    from sglang.srt.model_executor import pool_configurator

    owner = pool_configurator.SWARequestCapPoolConfigurator
    monkeypatch.setattr(owner, "is_applicable", staticmethod(lambda configurator: fixed is not None))
    monkeypatch.setattr(pool_configurator, "compute_swa_request_cap", lambda **_: fixed)
    schedule.swa_full_tokens_ratio = ratio
    budget, of_heads = 20 * GB, dict(head_dim=128, v_head_dim=128, swa_head_dim=128, swa_v_head_dim=128)
    changes = dict(
        is_hybrid_swa=True,
        sliding_window_size=512,
        layer_info=SimpleNamespace(
            full_attention_layer_ids=range(FULL), swa_attention_layer_ids=range(SLIDING)
        ),
        model_config=SimpleNamespace(
            hf_config=None, attention_arch=None, get_num_kv_heads=lambda *_: 8,
            get_swa_num_kv_heads=lambda *_: 8, **of_heads,
        ),
        dflash_draft_cell_size_per_token=3 * OF_LAYER,
    )  # fmt: skip

    def taken(config: Any) -> int:
        slots = config.full_max_total_num_tokens, config.swa_max_total_num_tokens
        return OF_LAYER * (slots[0] * (FULL + full) + slots[1] * (SLIDING + sliding))

    whole = configurator(**changes).config_from_budget(budget)
    draft_pool.price_groups(full, sliding)
    ours = configurator(**changes)
    for _ in range(2):  # the price is the same when SGLang sizes the pools once more
        config = ours.config_from_budget(budget)
        assert 0.999 * budget < taken(config) <= budget
        assert config.max_total_num_tokens / whole.max_total_num_tokens == pytest.approx(gain, abs=0.001)
