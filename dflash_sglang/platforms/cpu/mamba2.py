"""Torch forms of SGLang's kernels for Mamba2 layers: state-space scan, states.

As in `recurrent.py`, every sequence runs token by token. A head has one decay, one bias and one weight of its
input. SGLang's mixer repeats them along the head's other dimensions for decode and verify.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """x [n, T, heads, dim], dt [n, T, heads], A (negative), D and dt_bias [heads], B and C [n, T, groups, N],
    state [n, heads, dim, N].

    Each token decays the state by its time step, adds its input along B, and reads the state along C and its input
    by D. Returns the outputs [n, T, heads, dim] and the states after each token [n, T, heads, dim, N], float32.
    """
    shared = x.shape[2] // B.shape[2]
    B, C = (rows.float().repeat_interleave(shared, dim=2) for rows in (B, C))
    # In float64: torch's vectors and their tails round otherwise, by where in a tensor a token lies.
    x, dt = x.float(), softplus(dt.double() + dt_bias.double())
    decay, added = (dt * A.double()).exp().float(), dt.float()[..., None] * x
    outputs, states = [], []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, None, None] + added[:, t, ..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(dim=-1))
        states.append(state)
    return torch.stack(outputs, dim=1) + x * D.float()[:, None], torch.stack(states, dim=1)


def mamba_chunk_scan_combined(
    x: Tensor,  # [1, tokens, heads, dim], request after request
    dt: Tensor,  # [1, tokens, heads]
    A: Tensor,  # [heads]
    B: Tensor,  # [1, tokens, groups, N]
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor,  # [heads]
    dt_bias: Tensor,  # [heads]
    cu_seqlens: Tensor,  # [requests + 1]
    initial_states: Tensor | None,  # [requests, heads, dim, N]; None where all are zero
    track_end_locs: Tensor | None,  # [tracked], tokens of x before the states that the prefix cache takes
    out: Tensor,  # [1, tokens, heads, dim], written
    state_dtype: torch.dtype,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Prefill. Returns three sets of states [..., heads, dim, N].

    [1, chunks, ...] before each chunk of x, of no meaning where a request begins; [requests, ...] after each
    request; [1, tracked, ...] at `track_end_locs`.
    """
    bounds = cu_seqlens.tolist()
    if initial_states is None:
        initial_states = x.new_zeros(len(bounds) - 1, *x.shape[2:], B.shape[-1])
    after = []
    for i, (start, end) in enumerate(pairwise(bounds)):
        own_x, own_dt, own_B, own_C = (rows[:, start:end] for rows in (x, dt, B, C))
        before = initial_states[i, None].float()
        out[:, start:end], states = _scan(own_x, own_dt, A, own_B, own_C, D, dt_bias, before)
        after.append(states[0].to(state_dtype))
    states = torch.cat(after)
    chunks = torch.cat([torch.zeros_like(states[:1]), states[chunk_size - 1 :: chunk_size]])
    tracked = None if track_end_locs is None else states[None, track_end_locs.long() - 1]
    return chunks[None], states[cu_seqlens[1:].long() - 1], tracked


def selective_state_update(
    state: Tensor,  # [slots, heads, dim, N], written unless disable_state_update
    x: Tensor,  # [requests, heads, dim] or [requests, T, heads, dim]
    dt: Tensor,  # as x
    A: Tensor,  # [heads, dim, N]
    B: Tensor,  # [requests, groups, N] or [requests, T, groups, N]
    C: Tensor,
    D: Tensor,  # [heads, dim]
    *,
    dt_bias: Tensor,  # [heads, dim]
    state_batch_indices: Tensor,  # [requests]
    out: Tensor,  # as x, written
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,  # [requests, steps, heads, dim, N], written
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    **_: Any,
) -> None:
    """Decode and verify.

    The states of the next request's rows begin `cache_steps` rows further on, however many the buffer has for a
    request. The kernel counts so, too.
    """
    if x.ndim == 3:
        x, dt, B, C = (rows[:, None] for rows in (x, dt, B, C))
    slots = state_batch_indices.long()
    output, states = _scan(x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0], state[slots].float())
    out.copy_(output.view(out.shape))
    if not disable_state_update:
        state[slots] = states[:, -1].to(state.dtype)
    if intermediate_states_buffer is not None and intermediate_state_indices is not None:
        rows = intermediate_state_indices.long()[:, None] * cache_steps + torch.arange(states.shape[1])
        intermediate_states_buffer.view(-1, *state.shape[1:])[rows] = states.to(intermediate_states_buffer.dtype)
