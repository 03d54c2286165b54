"""The CPU platform's torch forms of Mamba2 kernels, against transformers' forms and against each other."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_sglang.platforms.cpu.mamba2 import (
    mamba_chunk_scan_combined,
    selective_state_update,
)

HEADS, DIM, GROUPS, N, CHUNK = 4, 3, 2, 5, 4
SLOTS, STEPS = 6, 8


def layer(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(3, HEADS, generator=generator)
    return dict(A=-random[0], D=random[1], dt_bias=random[2] - 0.5)


def tokens(count: int, seed: int) -> dict[str, Tensor]:
    """Of one request: x [count, HEADS, DIM], dt [count, HEADS], B and C [count, GROUPS, N]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(x=(HEADS, DIM), dt=(HEADS,), B=(GROUPS, N), C=(GROUPS, N))
    return {name: torch.randn(count, *shape, generator=generator) for name, shape in shapes.items()}


def states(count: int, seed: int) -> Tensor:
    return torch.randn(count, HEADS, DIM, N, generator=torch.Generator().manual_seed(seed))


def prefill(
    weights: dict[str, Tensor], requests: list[dict[str, Tensor]], initial: Tensor | None, track: Any = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The output [tokens, HEADS, DIM] and what `mamba_chunk_scan_combined` returns."""
    flat = {name: torch.cat([one[name] for one in requests])[None] for name in requests[0]}
    out = torch.full_like(flat["x"], torch.nan)
    bounds = torch.tensor([0, *(len(one["x"]) for one in requests)]).cumsum(0).int()
    chunks, last, tracked = mamba_chunk_scan_combined(
        **flat,
        **weights,
        chunk_size=CHUNK,
        cu_seqlens=bounds,
        initial_states=initial,
        track_end_locs=track,
        out=out,
        state_dtype=torch.float32,
    )
    return out[0], chunks[0], last, tracked


def step(weights: dict[str, Tensor], rows: dict[str, Tensor], pool: Tensor, slots: Tensor, **more: Any) -> Tensor:
    """A decode, or a verify of rows [requests, T, ...], as SGLang's mixer calls it. Returns the output, as x."""
    out = torch.full_like(rows["x"], torch.nan)
    selective_state_update(
        pool,
        rows["x"],
        rows["dt"][..., None].expand(*rows["dt"].shape, DIM),
        weights["A"][:, None, None].expand(HEADS, DIM, N),
        rows["B"],
        rows["C"],
        weights["D"][:, None].expand(HEADS, DIM),
        z=None,
        dt_bias=weights["dt_bias"][:, None].expand(HEADS, DIM),
        dt_softplus=True,
        state_batch_indices=slots,
        out=out,
        **more,
    )
    return out


@given(
    lengths=st.lists(st.integers(1, 2 * CHUNK + 1), min_size=1, max_size=4),
    with_states=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=30)
def test_prefill_gives_each_request_the_outputs_and_states_of_transformers_chunked_scan(
    lengths: list[int], with_states: bool, seed: int
) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    weights = layer(seed)
    requests = [tokens(length, seed + i) for i, length in enumerate(lengths)]
    initial = states(len(lengths), seed) if with_states else None
    out, chunks, last, tracked = prefill(weights, requests, initial, torch.arange(1, sum(lengths) + 1))
    assert tracked is not None
    outputs, after, flat = out.split(lengths), tracked[0].split(lengths), 0
    for i, one in enumerate(requests):
        before = None if initial is None else initial[i : i + 1]
        for count in range(1, lengths[i] + 1):
            expected, state = mamba2_chunk_scan(
                **{name: rows[None, :count] for name, rows in one.items() if name != "x"},
                **weights,
                hidden_states=one["x"][None, :count],
                chunk_size=CHUNK,
                dt_softplus=True,
                initial_states=before,
                return_final_states=True,
            )
            torch.testing.assert_close(outputs[i][:count], expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(after[i][count - 1], state[0], rtol=1e-4, atol=1e-5)
            flat += 1
            if flat % CHUNK == 0:  # what the prefix cache finds by chunk, unless a request begins there
                assert torch.equal(chunks[flat // CHUNK], after[i][count - 1])
        assert torch.equal(last[i], after[i][-1])


@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_an_output_and_a_state_are_the_same_bits_however_a_sequence_was_cut(cuts: list[int], seed: int) -> None:
    """In prefills with states, in decodes, or in a verify whose states are kept aside."""
    weights, one = layer(seed), tokens(sum(cuts) + 3, seed)
    whole, _, last, _ = prefill(weights, [one], None)
    pool, outputs, at = torch.zeros(SLOTS, HEADS, DIM, N), [], 0
    for count in cuts:
        piece = {name: rows[at : at + count] for name, rows in one.items()}
        out, _, pool[3:4], _ = prefill(weights, [piece], pool[3:4].clone())
        outputs.append(out)
        at += count
    slot, kept = torch.tensor([3], dtype=torch.int32), torch.zeros(1, STEPS, HEADS, DIM, N)
    verified = {name: rows[None, at:] for name, rows in one.items()}
    aside = dict(intermediate_states_buffer=kept, intermediate_state_indices=torch.tensor([0]), cache_steps=STEPS)
    outputs.append(step(weights, verified, pool, slot, disable_state_update=True, **aside)[0])
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(kept[0, 2], last[0])
    for i in range(3):
        decoded = step(weights, {name: rows[at + i, None] for name, rows in one.items()}, pool, slot)
        assert torch.equal(decoded[0], whole[at + i])
        assert torch.equal(pool[3], kept[0, i])
