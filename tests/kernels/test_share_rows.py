"""Rows shared out by the draft's confidence: the Triton kernel equals its torch twin, both take the likeliest."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels.block import share_rows as kernels

GRID = 64  # sums of multiples of 1 / GRID are exact, in any order


def shared(twin: str, device: str, logprobs: list[list[float]], rows: int, slots: int) -> tuple[Any, Any]:
    lens = torch.full((slots,), -7, dtype=torch.int32, device=device)
    starts = torch.full((slots + 1,), -7, dtype=torch.int32, device=device)
    of_best = torch.tensor(logprobs, device=device)
    of_best = torch.stack([of_best, of_best - 5, of_best - 7], dim=-1)[..., 0]  # as a draft for trees has them
    getattr(kernels, f"share_rows_{twin}")(of_best, rows, lens, starts)
    return lens.tolist(), starts.tolist()


@settings(max_examples=30)
@given(data=st.data())
def test_the_rows_of_a_step_are_the_likeliest_of_the_batch(twin, device, data):
    bs, steps = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 16))
    levels = data.draw(st.sampled_from([1, 3, 40 * GRID]))
    value = st.integers(-levels, 0).map(lambda level: level / GRID)
    logprobs = data.draw(st.lists(st.lists(value, min_size=steps, max_size=steps), min_size=bs, max_size=bs))
    rows = data.draw(st.integers(bs, bs * (steps + 1)))
    slots = bs + data.draw(st.integers(0, 4))
    lens, starts = shared(twin, device, logprobs, rows, slots)
    assert sum(lens) == rows and lens[bs:] == [0] * (slots - bs)
    assert min(lens[:bs]) >= 1 and max(lens) <= steps + 1
    assert starts == [0, *itertools.accumulate(lens)]
    survival = [list(itertools.accumulate(row)) for row in logprobs]
    verified = [chance for row, n in zip(survival, lens, strict=False) for chance in row[: n - 1]]
    left = [chance for row, n in zip(survival, lens, strict=False) for chance in row[n - 1 :]]
    assert not verified or not left or min(verified) >= max(left)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), bs=st.sampled_from([1, 5, 31, 64]), share=st.floats(0, 1))
def test_the_kernel_equals_its_torch_twin(triton_runs, device, seed, bs, share):
    generator = torch.Generator().manual_seed(seed)
    logprobs = (-torch.rand((bs, 15), generator=generator) * 3 * GRID).round() / GRID
    logprobs[torch.rand((bs, 15), generator=generator) < 0.1] = 0.0
    logprobs[torch.rand((bs, 15), generator=generator) < 0.02] = float("-inf")
    rows = bs + round(share * bs * 15)
    found = [shared(twin, device, logprobs.tolist(), rows, 64) for twin in ("torch", "triton")]
    assert found[0] == found[1]


def test_of_equal_proposals_those_of_the_first_requests_are_verified(twin, device):
    assert shared(twin, device, [[0.0, -1.0], [0.0, -1.0], [0.0, -1.0]], 5, 3)[0] == [2, 2, 1]
    assert shared(twin, device, [[-1.0, 0.0], [0.0, -1.0], [-2.0, 0.0]], 6, 4)[0] == [3, 2, 1, 0]
