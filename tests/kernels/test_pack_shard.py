"""The packed best token of a row: the Triton kernel equals its torch twin, and both an argmax."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_sglang.kernels import pack_shard as kernels

INF = float("inf")


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    width=st.sampled_from([1, 7, 2048, 2049, 8192, 8193, 20_000]),
    first_id=st.sampled_from([0, 1, 70_000, 2**31 - 30_000]),
    masked=st.floats(0, 1),
    levels=st.sampled_from([1, 3, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_pack_kernel_equals_its_torch_twin(
    triton_runs, device, seed, rows, width, first_id, masked, levels, dtype
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels + 1, (rows, width), generator=generator).to(dtype) / 2
    logits[torch.rand(rows, width, generator=generator) < masked] = -INF  # a grammar's mask
    padded = torch.full((rows, width + 3), INF, dtype=dtype)
    padded[:, :width] = logits
    shard = padded.to(device)[:, :width]
    expected = kernels.pack_shard_torch(shard, first_id)
    assert torch.equal(kernels.pack_shard_triton(shard, first_id), expected)
    assert kernels.merge_shards(expected[None]).cpu().tolist() == [
        first_id + row.index(max(row)) for row in logits.float().tolist()
    ]


def test_a_row_of_nan_names_one_of_its_own_tokens(twin, device):
    logits = torch.full((2, 5000), float("nan"), device=device)
    logits[1, :4000] = 1.0
    packed = getattr(kernels, f"pack_shard_{twin}")(logits, 100)
    assert kernels.merge_shards(packed[None]).tolist() == [100, 4100]
