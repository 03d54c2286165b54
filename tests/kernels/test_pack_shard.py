"""The packed best tokens of a row: the Triton kernels equal their torch twins, and both a sort of the row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels.head import pack_shard as kernels

INF = float("inf")


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    width=st.sampled_from([1, 7, 2048, 2049, 16_384, 16_385, 40_000]),
    first_id=st.sampled_from([0, 1, 70_000, 2**31 - 50_000]),
    masked=st.floats(0, 1),
    levels=st.sampled_from([1, 3, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    strange=st.sampled_from([(), (float("nan"), INF), (-0.0, 0.0)]),
)
def test_the_pack_kernel_equals_its_torch_twin(
    triton_runs, device, seed, rows, width, first_id, masked, levels, dtype, strange
):
    generator = torch.Generator().manual_seed(seed)
    levels = min(levels, 2**15) if dtype == torch.float16 else levels
    logits = torch.randint(-levels, levels + 1, (rows, width), generator=generator).to(dtype) / 2
    for value in strange:
        logits[torch.rand(rows, width, generator=generator) < 3 / width] = value
    logits[torch.rand(rows, width, generator=generator) < masked] = -INF  # a grammar's mask
    padded = torch.full((rows, width + 3), INF, dtype=dtype)
    padded[:, :width] = logits
    shard = padded.to(device)[:, :width]
    expected = kernels.pack_shard_torch(shard, first_id)
    assert torch.equal(kernels.pack_shard_triton(shard, first_id), expected)
    ids = [first_id + row.index(max(row)) for row in logits.float().nan_to_num(INF, INF, -INF).tolist()]
    assert kernels.merge_shards(expected[None]).tolist() == ids
    assert kernels.merge_shards_triton(kernels._pack_parts(shard, first_id)).tolist() == ids
    assert kernels.best_ids(shard, first_id).tolist() == ids


@settings(max_examples=50)
@given(seed=st.integers(0, 10_000), shards=st.integers(1, 9), rows=st.sampled_from([1, 2, 31, 32, 33, 100]))
def test_the_merge_kernel_equals_its_torch_twin(triton_runs, device, seed, shards, rows):
    """Packed values of any sign, equal ones of neighbours, and shards without a token."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(-3, 4, (shards, rows), generator=generator) << 32
    packed = order | (kernels.LOW_BITS - torch.randint(0, 2**31, (shards, rows), generator=generator))
    packed[1::3] = torch.iinfo(torch.int64).min
    packed = packed.to(device)
    expected = kernels.merge_shards_torch(packed)
    assert torch.equal(kernels.merge_shards_triton(packed), expected)
    best = packed.max(dim=0).values
    assert expected.tolist() == [kernels.LOW_BITS - (value % 2**32) for value in best.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_nan_names_one_of_its_own_tokens(twin, device, dtype):
    logits = torch.full((2, 5000), float("nan"), device=device, dtype=dtype)
    logits[1, :4000] = 1.0
    packed = getattr(kernels, f"pack_shard_{twin}")(logits, 100)
    assert getattr(kernels, f"merge_shards_{twin}")(packed[None]).tolist() == [100, 4100]


def test_no_rows_and_rows_without_tokens_have_a_form(device):
    empty = torch.empty((0, 7), device=device)
    assert kernels.best_ids(empty).tolist() == kernels.pack_shard(empty, 0).tolist() == []
    assert kernels.pack_shard(empty.new_empty((2, 0)), 0).tolist() == [torch.iinfo(torch.int64).min] * 2


SCALINGS = (kernels.AS_IS, kernels.Scaling(0.4), kernels.Scaling(0.7, 5.0))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    count=st.sampled_from([1, 2, 8, 16]),
    width=st.sampled_from([1, 7, 2049, 16_385, 40_000]),
    masked=st.sampled_from([0.0, 0.4, 0.9, 0.9999]),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    columns=st.sampled_from([1, 5, 2048]),
    shards=st.sampled_from([1, 2, 3]),
    scaling=st.sampled_from(SCALINGS),
    merged=st.booleans(),
    mapped=st.booleans(),
)
def test_the_best_tokens_have_their_logprobs_over_all_shards(
    triton_runs, device, seed, count, width, masked, scale, dtype, columns, shards, scaling, merged, mapped
):
    """Equal logits in the order of their ids; the best ones in few columns of the kernel's, or in many. Shards as
    they are packed, or the parts of each merged as ranks gather them. Scaled logits, ids of another vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(3, width, generator=generator) * scale).to(dtype)
    logits[torch.rand(3, width, generator=generator) < masked] = -INF
    logits[:, 0] = 0.0
    tiles, column = (torch.randint(0, n, (3, 30), generator=generator) for n in (20, columns))
    high = (tiles * 2048 + column) % width
    logits.scatter_(1, high, (torch.randint(0, 4, (3, 30), generator=generator) * scale).to(dtype))
    logits = logits.to(device)
    numbers = logits.float() * scaling.multiplier
    if scaling.softcap is not None:
        numbers = (scaling.softcap * (numbers / scaling.softcap).tanh()).masked_fill(logits == -INF, -INF)
    logprobs = numbers.log_softmax(dim=-1)
    expected = torch.zeros(3, count, dtype=torch.int64, device=device)
    best = [sorted(range(width), key=lambda token: (-row[token], token))[:count] for row in logits.tolist()]
    expected[:, : len(best[0])] = torch.tensor(best, device=device)
    expected_logprobs = logprobs.gather(1, expected)
    expected_logprobs[:, width:] = -INF
    target_ids = torch.randperm(width, generator=generator).to(device) if mapped else None
    bounds = [width * shard // shards for shard in range(shards + 1)]
    parts = [(logits[:, start:end], start) for start, end in zip(bounds, bounds[1:], strict=False) if end > start]
    for twin in ("torch", "triton"):
        pack, merge_parts = (getattr(kernels, f"{name}_{twin}") for name in ("pack_best", "merge_parts"))
        packed = [pack(*part, count, scaling) for part in parts]
        if merged:
            packed = [merge_parts(of, count) for of in packed]
            assert all(len(of) == count + 1 for of in packed)
        found = kernels.Candidates(torch.full_like(expected, -7), torch.full_like(expected_logprobs, -7))
        getattr(kernels, f"merge_best_{twin}")(torch.cat(packed), count, scaling, target_ids, found)
        assert torch.equal(found.ids, expected if target_ids is None else target_ids[expected])
        torch.testing.assert_close(found.logprobs, expected_logprobs, atol=2e-5, rtol=1e-5)
    assert torch.equal(expected[:, 0], kernels.best_ids(logits))


def test_an_infinite_logit_is_certain_and_a_row_of_nan_too(twin, device):
    logits = torch.tensor([[0.0, INF, 0.0], [float("nan")] * 3], device=device)
    packed = getattr(kernels, f"pack_best_{twin}")(logits, 0, 2)
    ids, logprobs = torch.empty((2, 2), dtype=torch.int64, device=device), torch.empty((2, 2), device=device)
    found = kernels.Candidates(ids, logprobs)
    getattr(kernels, f"merge_best_{twin}")(packed, 2, kernels.AS_IS, None, found)
    assert found.ids.tolist() == [[1, 0], [0, 1]] and found.logprobs.tolist() == [[0.0, -INF], [0.0, 0.0]]
