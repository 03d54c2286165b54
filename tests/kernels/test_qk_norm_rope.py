"""Norm and rotation of a block's heads (C6): bits are those of SGLang's kernel, values those of the definition."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dflash_sglang.kernels.context import qk_norm_rope as kernels
from tests.support import sglang_layers as layers

POSITIONS = 64
EPS = 1e-6


class Inputs(NamedTuple):
    """Arguments of the kernel; `qk` is a part of wider rows."""

    qk: Tensor
    positions: Tensor
    q_norm: Tensor
    k_norm: Tensor
    cos_sin: Tensor
    q_heads: int
    k_heads: int
    head_dim: int
    eps: float


def inputs(rows: int, q_heads: int, k_heads: int, head_dim: int, device: str, eps: float = EPS) -> Inputs:
    """Rows of queries, keys and values behind 16 elements of others; the first position is the table's last."""
    x = 2 * torch.randn(rows, 16 + (q_heads + 2 * k_heads) * head_dim)
    if device == "cpu":
        x = (8 * x).round() / 8  # squares add up to the same in any order: that of the interpreter is numpy's
    positions = torch.randint(POSITIONS, (rows,))
    positions[:1] = POSITIONS - 1
    norms = torch.randn(2, head_dim).bfloat16().to(device)
    cos_sin = torch.randn(POSITIONS, head_dim).to(device)
    qk = x.bfloat16().to(device)[:, 16:]
    return Inputs(qk, positions.to(device), *norms, cos_sin, q_heads, k_heads, head_dim, eps)


def applied(launch, given: Inputs) -> Tensor:
    """What the launch leaves of the whole rows that `qk` is a part of."""
    whole = given.qk._base.clone()
    launch(*given._replace(qk=whole[:, 16:]))
    return whole


def sglangs(qk, positions, q_norm, k_norm, cos_sin, *sizes) -> None:
    from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_

    table_qk_norm_rope_(qk, positions, q_norm, k_norm, cos_sin, *sizes)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


SHAPES = [
    (1, 32, 8, 128),
    (16, 4, 2, 128),
    (33, 0, 3, 128),
    (33, 5, 1, 64),
    (16, 0, 1, 64),
    (16, 3, 1, 256),
    (5, 4, 2, 16),
    (5, 4, 2, 32),
]


@pytest.mark.parametrize(("rows", "q_heads", "k_heads", "head_dim"), SHAPES)
def test_bits_are_those_of_sglangs_kernel(triton_runs, device, rows, q_heads, k_heads, head_dim):
    given = inputs(rows, q_heads, k_heads, head_dim, device)
    got, before = applied(kernels.qk_norm_rope_, given), given.qk._base
    assert torch.equal(bits(got), bits(applied(sglangs, given)))
    end = 16 + (q_heads + k_heads) * head_dim
    assert torch.equal(got[:, :16], before[:, :16]) and torch.equal(got[:, end:], before[:, end:])
    assert (got[:, 16:end] != before[:, 16:end]).float().mean() > 0.9


@pytest.mark.parametrize(("rows", "q_heads", "k_heads", "head_dim"), SHAPES)
def test_values_are_those_of_the_definition(triton_runs, device, rows, q_heads, k_heads, head_dim):
    given = inputs(rows, q_heads, k_heads, head_dim, device)
    got, wanted = (applied(f, given).float() for f in (kernels.qk_norm_rope_, kernels.qk_norm_rope_torch_))
    # Two roundings, the first of either half; the interpreter truncates where a GPU rounds.
    most = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, rtol=2**-6, atol=most * 2**-8)
    assert (got - wanted).abs().mean() < 2**-7 * wanted.abs().mean()


def test_the_definition_norms_each_head_by_its_weight_and_turns_its_halves_against_each_other():
    # Mean squares 4 and 16; the angle's cosine 0.5, its sine 0.25 in the first lane and 0 in the second.
    qk = torch.tensor([[2.0, 2, -2, 2, 4, -4, 4, 4, 9]]).bfloat16()
    norms = torch.tensor([[1.0, 2, 3, 4], [1, 1, 1, 1]]).bfloat16()
    cos_sin = torch.tensor([[0.0] * 4, [0.5, 0.5, 0.25, 0]])
    kernels.qk_norm_rope_torch_(qk, torch.tensor([1]), *norms, cos_sin, 1, 1, 4, 0.0)
    # Normed: (1, 2, -3, 4) and (1, -1, 1, 1).
    assert qk.tolist() == [[0.5 + 0.75, 1, -1.5 + 0.25, 2, 0.5 - 0.25, -0.5, 0.5 + 0.25, 0.5, 9]]


def test_no_rows_launch_nothing(monkeypatch):
    monkeypatch.setattr(kernels, "_qk_norm_rope_kernel", None)
    given = inputs(0, 4, 2, 64, "cpu")
    assert applied(kernels.qk_norm_rope_, given).shape == (0, 16 + 8 * 64)


def compiled_sum(squares: Tensor) -> Tensor:
    """Sums of [..., head_dim] as Triton compiles `tl.sum` for four warps, butterfly by butterfly."""
    threads, each = min(squares.shape[-1], 128), max(squares.shape[-1] // 128, 1)
    lanes = min(threads, 32)
    sums = squares.float().unflatten(-1, (threads // lanes, lanes, each))
    while sums.shape[-1] > 1:  # of a thread
        sums = sums[..., ::2] + sums[..., 1::2]
    sums = sums[..., 0]
    for distance in (16, 8, 4, 2, 1):
        if distance < lanes:
            sums = sums + sums[..., torch.arange(lanes) ^ distance]
    sums = sums[..., 0]
    for distance in (2, 1):
        if distance < threads // lanes:
            sums = sums + sums[..., torch.arange(threads // lanes) ^ distance]
    return sums[..., 0]


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
def test_squares_are_added_in_the_order_of_sglangs_compiled_kernel(triton_runs, device, head_dim):
    """Every head holds the same numbers in another order, and a negative eps leaves of their sum what the order
    decides."""
    heads = 64
    numbers = (torch.randn(head_dim) * 2.0 ** torch.randint(-9, 2, (head_dim,))).bfloat16()
    qk = torch.stack([numbers[torch.randperm(head_dim)] for _ in range(heads)])
    exact = float(qk[0].double().square().mean())
    given = inputs(1, heads, 0, head_dim, device, eps=float(torch.tensor(-exact * (1 - 1e-6))))
    ones = torch.ones(head_dim, dtype=torch.bfloat16, device=device)
    cos_sin = torch.cat((torch.ones(POSITIONS, head_dim // 2), torch.zeros(POSITIONS, head_dim // 2)), dim=1)
    given = given._replace(q_norm=ones, k_norm=ones, cos_sin=cos_sin.to(device))
    got, of_sglang = (qk.clone().view(1, -1).to(device) for _ in range(2))
    kernels.qk_norm_rope_(*given._replace(qk=got))
    left = compiled_sum(qk.float().square()) / head_dim + torch.tensor(given.eps)
    assert len(left.unique()) > 1
    wanted = qk.float() / left.sqrt()[:, None]
    torch.testing.assert_close(got.cpu().float().view(heads, -1), wanted, rtol=2**-6, atol=0)
    if device == "cuda":  # else numpy adds SGLang's up
        sglangs(*given._replace(qk=of_sglang))
        assert torch.equal(bits(got), bits(of_sglang))


@pytest.mark.gpu
@pytest.mark.skipif(layers.DEVICE == "cpu", reason="needs a CUDA GPU: compiled kernels")
@pytest.mark.parametrize("rows", [16, 512])
def test_on_a_gpu_bits_are_those_of_sglangs_kernel_also_in_a_graph(rows):
    given = inputs(rows, 32, 8, 128, "cuda")
    whole, wanted = given.qk._base.clone(), applied(sglangs, given)
    assert torch.equal(bits(applied(kernels.qk_norm_rope_, given)), bits(wanted))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.qk_norm_rope_(*given._replace(qk=whole[:, 16:]))
    graph.replay()
    assert torch.equal(bits(whole), bits(wanted))


@pytest.mark.gpu
@pytest.mark.skipif(layers.DEVICE == "cpu", reason="needs a CUDA GPU: compiled kernels")
def test_on_a_gpu_nothing_is_compiled_for_other_rows_or_a_part_of_the_positions():
    kernel, device = kernels._qk_norm_rope_kernel, torch.cuda.current_device()
    given = inputs(40, 4, 2, 64, "cuda")
    kernels.qk_norm_rope_(*given)
    compiled = len(kernel.device_caches[device][0])
    for start, end in ((0, 1), (1, 2), (3, 40)):
        part = slice(start, end)
        kernels.qk_norm_rope_(*given._replace(qk=given.qk[part], positions=given.positions[part]))
    assert len(kernel.device_caches[device][0]) == compiled > 0
