"""Start-up of widths: which a launch can have, which memory allows, what a kernel misplaces."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest

from dflash_sglang.attention.verifying import verifies_parts
from dflash_sglang.settings.width import WidthConfig
from dflash_sglang.startup.facts import StartupError
from dflash_sglang.warmup.dummy_batches import Rehearsal
from dflash_sglang.width import startup
from dflash_sglang.width.ranks import Group

BLOCK = 16
ALONE, LOADS = Group(), Group(gather=lambda row: row)
CHAINS = {32: 4, 64: 2}


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(startup, "get_parallel", lambda: SimpleNamespace(tp_rank=0))


class Backend(SimpleNamespace):
    """Attention that verifies parts of blocks and trees."""

    supports_ragged_verify_graph, is_xqa_impl, serve_trees = True, False, None


def runner_of(backend: Any, what: str | None) -> Any:
    return SimpleNamespace(
        attn_backend=backend,
        model_config=SimpleNamespace(model_is_mrope=what == "positions"),
        server_args=SimpleNamespace(
            enable_return_routed_experts=what == "experts",
            disable_cuda_graph_padding=what == "padding",
            enable_return_indexer_topk=what == "indexer",
            nnodes=2 if what == "nodes" else 1,
        ),
    )


BOTH = {
    "loads": "ranks hold requests of their own",
    "positions": "positions of three axes",
    "padding": "without padding",
    "experts": "what layers chose is reported",
    "indexer": "what layers chose is reported",
}
OF_ROWS = "Backend verifies as many rows of each request; fa3 does not have to"
ONLY_RAGGED = {
    "attention": OF_ROWS, "xqa": OF_ROWS, "recurrent": OF_ROWS,
    "nodes": "ranks are on several nodes", "draft": "layers",
}  # fmt: skip
NO_CHAINS = {
    "fixed": "steps have one width only",
    "attention": "no test verifies longer chains with SimpleNamespace",
}


@pytest.mark.parametrize("what", [None, "pair", "fixed", *BOTH, *ONLY_RAGGED])
def test_ragged_steps_where_they_cannot_be_had_are_left_out_with_the_reason(what: str | None, caplog) -> None:
    backend: Any = Backend()
    backend.supports_ragged_verify_graph = what not in ("attention", "pair")
    backend.is_xqa_impl = what == "xqa"
    if what == "recurrent":
        backend.linear_attn_backend = object()
    if what == "pair":  # SGLang's, of which one verifies
        backend._select_backend = lambda mode: Backend() if mode.is_target_verify() else None
    config = WidthConfig(fixed=8 if what == "fixed" else None)
    group, draft = LOADS if what == "loads" else ALONE, "layers" if what == "draft" else None
    assert startup.can_be_ragged(config, runner_of(backend, what), group, draft) == (what in (None, "pair"))
    reason = (BOTH | ONLY_RAGGED).get(str(what))
    assert (f"not ragged: {reason}" in caplog.text or reason in caplog.text) if reason else not caplog.text


def test_sglangs_triton_attention_has_as_many_rows_of_each_request() -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    assert not verifies_parts(object.__new__(TritonAttnBackend))


@pytest.mark.parametrize(("what", "why"), [(None, None), *BOTH.items(), *NO_CHAINS.items()])
def test_launches_without_longer_chains_say_why(what: str | None, why: str | None) -> None:
    backend = SimpleNamespace() if what == "attention" else Backend()
    config, group = WidthConfig(fixed=BLOCK if what == "fixed" else None), LOADS if what == "loads" else ALONE
    reason = startup.why_no_chains(config, runner_of(backend, what), group)
    assert (reason is None) == (why is None) and (why or "") in (reason or "")


@pytest.mark.parametrize("what", ["recurrent", "adapters", "deterministic", "padding", "hooks", None])
def test_a_launch_that_has_one_width_is_served_at_the_blocks_and_refuses_others(what, monkeypatch, caplog):
    exec_ = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=what == "deterministic"))
    observed = SimpleNamespace(forward_hooks=[{}] if what == "hooks" else None)
    for name, value in (("mambaish_config", lambda config: config), ("get_exec", lambda: exec_),
                        ("get_observability", lambda: observed)):  # fmt: skip
        monkeypatch.setattr(startup, name, value)
    runner: Any = SimpleNamespace(
        model_config="KDA" if what == "recurrent" else None,
        attn_backend=SimpleNamespace(linear_attn_backend=SimpleNamespace(accept_lens_pool="handed on")),
        lora_manager="adapters" if what == "adapters" else None,
        server_args=SimpleNamespace(disable_cuda_graph_padding=what == "padding"),
    )
    served = startup.servable(WidthConfig(), runner, BLOCK)
    assert served == (WidthConfig() if what is None else WidthConfig(fixed="block"))
    assert ("always the block's, 16: " in caplog.text) == (what is not None)
    for same in (WidthConfig(fixed="block"), WidthConfig(fixed=BLOCK)):
        assert startup.servable(same, runner, BLOCK) is same
    for other in (WidthConfig(fixed=8), WidthConfig(widths=(4, 8))):
        if what in (None, "padding"):  # they have graphs of all batches, or were asked for
            assert startup.servable(other, runner, BLOCK) is other
            continue
        with pytest.raises(StartupError, match="DFLASH_SGLANG_CONFIG width=.*expected 'block' alone"):
            startup.servable(other, runner, BLOCK)


@pytest.mark.parametrize(("free", "ragged"), [(3.6, True), (3.4, False)])
def test_ragged_steps_cost_as_much_as_a_width_and_what_is_left_out_is_not_served(free, ragged, caplog):
    added: list[Any] = []
    states: Any = SimpleNamespace(
        add_while_free=lambda *_: {1: 1.5, 4: 1.0}, add_ragged=lambda: added.append("ragged"), add=added.append
    )
    served = startup.add_widths(WidthConfig(), states, BLOCK, lambda: free, ragged=True)
    assert served == WidthConfig(widths=(1, 4, 16)) and added == ["ragged"] * ragged
    assert ("not ragged: its graphs would not leave 2 GB free" in caplog.text) == (not ragged)
    assert (
        "verify widths: (1, 4, 16); left out, to keep 2 GB free: [2, 6, 8, 12]; memory that was added, in GB: "
        "1: 1.500, 4: 1.000" in caplog.text
    )
    fixed = WidthConfig(fixed=8)
    assert startup.add_widths(fixed, states, BLOCK, lambda: free) is fixed and added[-1] == 8


def test_chains_that_would_leave_too_little_memory_are_not_served(caplog) -> None:
    states: Any = SimpleNamespace(chains={})
    states.add_chain = states.chains.__setitem__
    left = iter([3.0, 2.6, 2.6])
    startup.add_chains(CHAINS, states, lambda: next(left), 2.5, None)
    assert states.chains == {64: 2}
    assert "copies beyond blocks: 64 rows up to 2 requests; left out, to keep 2.5 GB free: [32]" in caplog.text
    states.chains.clear()
    startup.add_chains(CHAINS, states, lambda: 9.0, 2.5, "steps have one width only")
    assert not states.chains and "copies beyond blocks: none: steps have one width only" in caplog.text


# ---- Recurrent states that a kernel puts elsewhere -----------------------------------------------------------


class FlashInferKernel:
    pass


def left_of(
    config: WidthConfig, monkeypatch: pytest.MonkeyPatch, wrong: Sequence[int], group: Group = ALONE, rank: int = 0
) -> tuple[WidthConfig, list[tuple[int, ...]], list[int]]:
    """What is served on a rank whose kernel misplaces states at the widths `wrong`; which steps it rehearsed, as
    (requests, context, width); and which widths it dropped."""
    monkeypatch.setattr(startup, "get_parallel", lambda: SimpleNamespace(tp_rank=rank))
    monkeypatch.setattr(startup, "keeps_apart", lambda width, requests, step: step() or width not in wrong)
    rehearsed: list[tuple[int, ...]] = []
    dropped: list[int] = []
    states: Any = SimpleNamespace(recurrent=lambda width: width, drop=dropped.extend)
    linear = SimpleNamespace(kernel_dispatcher=SimpleNamespace(verify_kernel=FlashInferKernel()))
    runner: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=48), attn_backend=SimpleNamespace(linear_attn_backend=linear)
    )
    rehearsal = create_autospec(Rehearsal, instance=True)
    rehearsal.seconds.side_effect = lambda n, context, shape: rehearsed.append((n, context, shape.width))
    served = startup.without_misplaced_states(config, states, runner, rehearsal, group, BLOCK)
    return served, rehearsed, dropped


@pytest.mark.parametrize("wrong, served", [((), (1, 4, 8, 16)), ((1, 4, 8), (16,)), ((8, 16), None)])
def test_widths_whose_recurrent_states_lie_elsewhere_are_left_out_with_the_kernels_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: Any, served: Any
) -> None:
    config, block = WidthConfig(widths=(4, 8, 16)), WidthConfig(fixed="block")
    assert left_of(block, monkeypatch, wrong) == (block, [], [])
    refused = pytest.raises(StartupError, match="linear-attention kernel='FlashInferKernel': .* at widths ")
    if served is None:
        with refused:
            left_of(config, monkeypatch, wrong)
        return
    left, rehearsed, dropped = left_of(config, monkeypatch, wrong)
    assert left.states(BLOCK) == served and dropped == list(wrong)
    assert rehearsed == [(2, 1, width) for width in (1, 4, 8, 16)]
    if wrong:
        assert f"left out {list(wrong)}: at these, FlashInferKernel does not keep the states" in caplog.text
        with refused:
            left_of(WidthConfig(fixed=wrong[0]), monkeypatch, wrong)


def test_ranks_leave_out_the_widths_at_which_rank_0_finds_recurrent_states_elsewhere(monkeypatch) -> None:
    for found in ([(), (4, 8)], [(4, 8), ()], [(8,), (4, 16)]):
        told: list[np.ndarray] = []
        for rank, wrong in enumerate(found):
            group = Group(rank == 0, lambda row, told=told: told.append(row) or told[0])
            left, rehearsed, dropped = left_of(WidthConfig(widths=(4, 8, 16)), monkeypatch, wrong, group, rank)
            assert left.states(BLOCK) == tuple(width for width in (1, 4, 8, 16) if width not in found[0])
            assert len(rehearsed) == 4 and dropped == list(found[0])
        assert len(told) == len(found)
