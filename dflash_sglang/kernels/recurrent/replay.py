"""States of gated delta nets after the accepted rows of a verify, from what the rows would have written."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_TILE = 32  # values of a state that one program moves on, as in SGLang's verify


class ReplayRows(NamedTuple):
    """What a verify keeps of its rows, in SGLang's layout: by the slot of the request's state, each contiguous
    from the third dimension on."""

    values: Tensor  # [layers, slots, v_heads, block, V]
    keys: Tensor  # [layers, slots, heads, block, K], before their norm
    decay: Tensor  # [layers, slots, v_heads, block] float32, its logarithm
    beta: Tensor  # [layers, slots, v_heads, block] float32


def replay(
    states: Tensor,
    rows: ReplayRows,
    slots: Tensor,
    lens: Tensor,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
) -> None:
    """Move the states of a batch on by its accepted rows, in one launch for all layers.

    states [layers, slots, v_heads, V, K], written, each slot's contiguous. slots [bs]: of the requests' states,
    negative for none. lens [bs]: how many rows of each are accepted. track_slots, track_steps [bs]: where the
    state after row `track_steps` of a request goes too; negative for nowhere. Numbers are int32 or int64.

    A state equals bit for bit the one that SGLang's Triton verify writes of the row: the same operations on the
    same numbers. (SGLang's own replay divides a key by its norm, where its verify multiplies by the reciprocal.)
    """
    launch = replay_triton if states.is_cuda else replay_torch
    launch(states, rows, slots, lens, track_slots, track_steps)


def delta_rule(state: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The state after one more token: it decays, then what it holds at the key moves towards the value by beta.

    state [..., V, K], key [..., K] with its norm divided out, value [..., V], decay (log) and beta [...], float32.
    """
    state = state * decay[..., None, None].exp()
    held = (state * key[..., None, :]).sum(dim=-1)
    change = (value - held) * beta[..., None]
    return state + change[..., None] * key[..., None, :]


def unit(x: Tensor) -> Tensor:
    """Vectors [..., K] divided by their norms, float32."""
    x = x.float()
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def replay_torch(
    states: Tensor,
    rows: ReplayRows,
    slots: Tensor,
    lens: Tensor,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
) -> None:
    """The definition of `replay` in torch operations."""
    shared = rows.values.shape[2] // rows.keys.shape[2]
    for i, (slot, accepted) in enumerate(zip(slots.tolist(), lens.tolist(), strict=True)):
        if slot < 0:
            continue
        keys = unit(rows.keys[:, slot]).repeat_interleave(shared, dim=1)
        values, state = rows.values[:, slot].float(), states[:, slot].float()
        for row in range(accepted):
            decay, beta = rows.decay[:, slot, :, row], rows.beta[:, slot, :, row]
            state = delta_rule(state, keys[:, :, row], values[:, :, row], decay, beta)
            if track_slots is not None and track_steps is not None and track_steps[i] == row:
                if track_slots[i] >= 0:
                    states[:, track_slots[i]] = state.to(states.dtype)
        states[:, slot] = state.to(states.dtype)


def replay_triton(
    states: Tensor,
    rows: ReplayRows,
    slots: Tensor,
    lens: Tensor,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
) -> None:
    """`replay` as one Triton launch."""
    layers, _, v_heads, v_dim, k_dim = states.shape
    tracks = track_slots is not None and track_steps is not None
    tile = min(_TILE, triton.next_power_of_2(v_dim))
    _replay_kernel[(triton.cdiv(v_dim, tile), len(slots), layers * v_heads)](
        states, *rows, slots, lens, track_slots if tracks else slots, track_steps if tracks else lens,
        *(x.stride(dim) for x in (states, *rows) for dim in (0, 1)),
        HEADS=rows.keys.shape[2], V_HEADS=v_heads, BLOCK=rows.keys.shape[3], K=k_dim, V=v_dim,
        BK=triton.next_power_of_2(k_dim), BV=tile, TRACKS=tracks, num_warps=1,
    )  # fmt: skip


@triton.jit
def _replay_kernel(
    states_ptr, values_ptr, keys_ptr, decay_ptr, beta_ptr, slots_ptr, lens_ptr, track_slots_ptr, track_steps_ptr,
    state_layer: tl.constexpr, state_slot: tl.constexpr, value_layer: tl.constexpr, value_slot: tl.constexpr,
    key_layer: tl.constexpr, key_slot: tl.constexpr, decay_layer: tl.constexpr, decay_slot: tl.constexpr,
    beta_layer: tl.constexpr, beta_slot: tl.constexpr,
    HEADS: tl.constexpr, V_HEADS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, TRACKS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1)
    layer = (tl.program_id(2) // V_HEADS).to(tl.int64)
    v_head = tl.program_id(2) % V_HEADS
    head = v_head // (V_HEADS // HEADS)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    accepted = tl.load(lens_ptr + request).to(tl.int32)
    if slot < 0:
        return
    at_k = tl.arange(0, BK)
    at_v = tl.program_id(0) * BV + tl.arange(0, BV)
    k_there, v_there = at_k < K, at_v < V
    there = k_there[:, None] & v_there[None, :]
    of_head = states_ptr + layer * state_layer + v_head * V * K + at_v[None, :] * K + at_k[:, None]
    state = tl.load(of_head + slot * state_slot, mask=there, other=0.0).to(tl.float32)
    keys_ptr += layer * key_layer + slot * key_slot + head * BLOCK * K
    values_ptr += layer * value_layer + slot * value_slot + v_head * BLOCK * V
    decay_ptr += layer * decay_layer + slot * decay_slot + v_head * BLOCK
    beta_ptr += layer * beta_layer + slot * beta_slot + v_head * BLOCK
    if TRACKS:
        track_slot = tl.load(track_slots_ptr + request).to(tl.int64)
        track_step = tl.load(track_steps_ptr + request).to(tl.int32)
    for row in range(0, accepted):
        key = tl.load(keys_ptr + row * K + at_k, mask=k_there, other=0.0).to(tl.float32)
        value = tl.load(values_ptr + row * V + at_v, mask=v_there, other=0.0).to(tl.float32)
        decay = tl.load(decay_ptr + row)
        beta = tl.load(beta_ptr + row)
        key *= 1.0 / tl.sqrt(tl.sum(key * key) + 1e-6)
        state *= tl.exp(decay)
        value -= tl.sum(state * key[:, None], 0)
        value *= beta
        state += key[:, None] * value[None, :]
        if TRACKS:
            if (row == track_step) & (track_slot >= 0):
                tl.store(of_head + track_slot * state_slot, state.to(states_ptr.dtype.element_ty), mask=there)
    tl.store(of_head + slot * state_slot, state.to(states_ptr.dtype.element_ty), mask=there)
