"""The replay of accepted rows: the kernel moves states to where SGLang's verify has them, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from torch import Tensor

from dflash_sglang.kernels.recurrent import replay as kernels
from dflash_sglang.kernels.recurrent.replay import ReplayRows
from dflash_sglang.patches.replayed_states import fused_sigmoid_gating_recurrent as launches
from dflash_sglang.patches.replayed_states import narrow_tiles

LAYERS, SLOTS, HEADS, V_HEADS, BLOCK, K, V = 2, 9, 2, 4, 4, 8, 16


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def random_rows(generator: torch.Generator) -> ReplayRows:
    return ReplayRows(
        values=normal(generator, LAYERS, SLOTS, V_HEADS, BLOCK, V),
        keys=normal(generator, LAYERS, SLOTS, HEADS, BLOCK, K),
        decay=-normal(generator, LAYERS, SLOTS, V_HEADS, BLOCK).abs(),
        beta=normal(generator, LAYERS, SLOTS, V_HEADS, BLOCK).sigmoid(),
    )


def expected_states(
    states: Tensor, rows: ReplayRows, slots: list[int], lens: list[int], track: list[tuple[int, int]]
) -> Tensor:
    """Head by head, with matrices: S -> exp(g) S (I - beta k k^T) + beta v k^T."""
    out = states.clone()
    for slot, accepted, (track_slot, track_step) in zip(slots, lens, track, strict=True):
        for layer in range(LAYERS) if slot >= 0 else ():
            for v_head in range(V_HEADS):
                state = states[layer, slot, v_head].double()
                for row in range(accepted):
                    key = rows.keys[layer, slot, v_head // (V_HEADS // HEADS), row].double()
                    key /= (key @ key + 1e-6).sqrt()
                    beta = rows.beta[layer, slot, v_head, row].double()
                    kept = torch.eye(K, dtype=torch.float64) - beta * key[:, None] * key[None]
                    written = beta * rows.values[layer, slot, v_head, row].double()[:, None] * key[None]
                    state = rows.decay[layer, slot, v_head, row].double().exp() * state @ kept + written
                    if row == track_step and track_slot >= 0:
                        out[layer, track_slot, v_head] = state.float()
                out[layer, slot, v_head] = state.float()
    return out


@settings(max_examples=12)
@given(data=st.data())
def test_states_move_on_by_the_accepted_rows(twin, device, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    states, rows = normal(generator, LAYERS, SLOTS, V_HEADS, V, K), random_rows(generator)
    bs = data.draw(st.integers(1, 4))
    places = data.draw(st.permutations(range(SLOTS)))
    slots = [-1 if data.draw(st.booleans()) and bs > 1 else slot for slot in places[:bs]]
    lens = data.draw(st.lists(st.integers(1, BLOCK), min_size=bs, max_size=bs))
    track = [
        (data.draw(st.sampled_from([slot, -1])), data.draw(st.integers(-1, length - 1)))
        for slot, length in zip(places[bs : 2 * bs], lens, strict=True)
    ]
    tracks = data.draw(st.booleans())
    expected = expected_states(states, rows, slots, lens, track if tracks else [(-1, -1)] * bs)
    got = states.to(device)
    numbers = [torch.tensor(x, device=device) for x in (slots, lens, *map(list, zip(*track, strict=True)))]
    moved = ReplayRows(*(x.to(device) for x in rows))
    getattr(kernels, f"replay_{twin}")(got, moved, *numbers[: 4 if tracks else 2])
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-5, atol=1e-5)
    untouched = sorted(set(range(SLOTS)) - set(slots) - {slot for slot, _ in track if tracks})
    assert torch.equal(got.cpu()[:, untouched], states[:, untouched])


@pytest.mark.parametrize("states_in, rows_in", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                                (torch.bfloat16, torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize("requests, width", [(3, 4), (2, 1), (70, 16)])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_replayed_state_is_bit_for_bit_the_one_that_the_verify_kept(
    triton_runs, device, states_in, rows_in, requests, width, narrow, monkeypatch
):
    """A verify with states of rows, one with rows: the same outputs, and the same states after any accept. narrow:
    with the tiles that row `replay-tiles` of the patches gives the second one, on Hopper."""
    if narrow:
        select = launches._select_recurrent_launch_config
        monkeypatch.setattr(launches, "_select_recurrent_launch_config", narrow_tiles(select))
    k_dim, v_dim, heads, v_heads, block = (128, 128, 4, 8, 16) if device == "cuda" else (32, 32, 1, 2, 4)
    if device != "cuda":
        requests, width = min(requests, 3), min(width, block)
    generator = torch.Generator().manual_seed(requests)
    slots = requests + 3
    states = normal(generator, slots, v_heads, v_dim, k_dim).to(states_in)
    of_request = torch.randperm(slots, generator=generator)[:requests].int()
    batch = dict(
        q=normal(generator, 1, requests * width, heads, k_dim).to(rows_in),
        k=normal(generator, 1, requests * width, heads, k_dim).to(rows_in),
        v=normal(generator, 1, requests * width, v_heads, v_dim).to(rows_in),
        a=normal(generator, requests * width, v_heads).to(rows_in),
        b=normal(generator, requests * width, v_heads).to(rows_in),
        A_log=normal(generator, v_heads),
        dt_bias=normal(generator, v_heads),
        cu_seqlens=torch.arange(0, requests * width + 1, width, dtype=torch.int32),
        initial_state_source=states,
        initial_state_indices=of_request,
    )
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    kept = torch.zeros((requests, width, v_heads, v_dim, k_dim), dtype=states_in, device=device)
    own = torch.arange(requests, dtype=torch.int32, device=device)
    rows = ReplayRows(
        values=torch.zeros((slots, v_heads, block, v_dim), dtype=rows_in, device=device),
        keys=torch.zeros((slots, heads, block, k_dim), dtype=rows_in, device=device),
        decay=torch.zeros((slots, v_heads, block), device=device),
        beta=torch.zeros((slots, v_heads, block), device=device),
    )
    with_states = verify(**batch, intermediate_states_buffer=kept, intermediate_state_indices=own)
    with_rows = verify(**batch, cache_ring=True, **dict(zip(RINGS, rows, strict=True)))
    assert torch.equal(with_states, with_rows)
    lens = torch.randint(1, width + 1, (requests,), generator=generator).to(device)
    moved = batch["initial_state_source"][None].clone()
    kernels.replay_triton(moved, ReplayRows(*(x[None] for x in rows)), batch["initial_state_indices"], lens.int())
    assert torch.equal(moved[0, batch["initial_state_indices"].long()], kept[own.long(), lens - 1])


RINGS = ("replayssm_rawv", "replayssm_rawk", "replayssm_g", "replayssm_beta")


def verify(**arguments: Any) -> Tensor:
    """SGLang's kernel of a verify, as its backend calls it."""
    return fused_sigmoid_gating_delta_rule_update(
        **arguments,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        use_qk_l2norm_in_kernel=True,
        is_kda=False,
        disable_state_update=True,
    )
