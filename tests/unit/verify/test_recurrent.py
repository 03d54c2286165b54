"""Recurrent targets: what ends start-up or gets the built-in worker."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_sglang import hooks
from dflash_sglang.startup.facts import StartupError
from dflash_sglang.verify import recurrent
from dflash_sglang.verify.recurrent import RecurrentStates
from tests.support.fakes import Algorithm, BuiltInWorker, arguments, built_in
from tests.unit.test_plugin import pair

__all__ = ["pair"]  # a fixture

BLOCK, GRID = 8, 64


def worker() -> SimpleNamespace:
    """A target worker with SGLang's own pool of states and attention backend, without anything around them."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.mem_cache.memory_pool import MambaPool

    caches = MambaPool.SpeculativeState(
        conv=[torch.zeros(2, 24, 3, 2)],
        temporal=torch.zeros(2, 24, 2, 4, 4),
        intermediate_ssm=torch.zeros(2, 7, BLOCK, 2, 4, 4),
        intermediate_conv_window=[torch.zeros(2, 7, BLOCK, 3, 2)],
    )
    pool = SimpleNamespace(
        req_to_token=torch.zeros(6, 1),
        mamba_pool=SimpleNamespace(mamba_cache=caches),
        get_speculative_mamba2_params_all_layers=lambda: caches,
        size=6,
        short_conv_pool=SimpleNamespace(conv_state=None),
        ngram_pool=SimpleNamespace(context=None),
    )
    backend = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
    backend.linear_attn_backend = SimpleNamespace(req_to_token_pool=pool, accept_lens_pool=None)
    runner = SimpleNamespace(
        model_config=None, model=None, device="cpu", page_size=1, attn_backend=backend, req_to_token_pool=pool
    )
    return SimpleNamespace(model_runner=runner)


@pytest.fixture(scope="module", autouse=True)
def recurrent_target() -> Any:
    """SGLang takes the fake for a target with recurrent layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "mambaish_config", lambda config: object())
        patch.setattr(recurrent, "mamba_track_grid", lambda page_size: GRID)
        yield


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
