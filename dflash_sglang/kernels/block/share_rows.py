"""Rows of a step shared out among its requests by how likely their proposals are to be accepted, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_sglang.kernels.head.pack_shard import sortable

# One compilation serves batches up to this size, and blocks up to this width: others, those of powers of two.
_REQUESTS, _LANES = 128, 16
_KEY_BITS = 32


def share_rows(logprobs: Tensor, rows: int, lens: Tensor, starts: Tensor) -> None:
    """How many rows of each request's block are verified, so that they are `rows` together.

    logprobs [bs, steps] float32: of each proposal, as the draft has it. A proposal counts by the chance that it
    and all before it are accepted, the sum of theirs; the likeliest of the batch are verified, besides each
    request's last token. Of equal ones those of the first requests are.

    lens [slots] int32, written: at least 1 and at most steps + 1, and 0 beyond bs; starts [slots + 1] int32,
    written: the sums of those before. rows: from bs to bs * (steps + 1).
    """
    launch = share_rows_triton if logprobs.is_cuda else share_rows_torch
    launch(logprobs, rows, lens, starts)


def share_rows_torch(logprobs: Tensor, rows: int, lens: Tensor, starts: Tensor) -> None:
    """The definition of `share_rows` in torch operations."""
    bs, steps = logprobs.shape
    survival = logprobs.cumsum(dim=1).flatten()
    chosen = survival.sort(descending=True, stable=True).indices[: rows - bs] // steps
    lens.zero_()
    lens[:bs] = 1 + torch.bincount(chosen, minlength=bs)
    starts[0] = 0
    starts[1:] = lens.cumsum(dim=0)


def share_rows_triton(logprobs: Tensor, rows: int, lens: Tensor, starts: Tensor) -> None:
    """`share_rows` as one Triton launch of one program."""
    bs, steps = logprobs.shape
    requests = max(_REQUESTS, triton.next_power_of_2(len(starts)))
    lanes = max(_LANES, triton.next_power_of_2(steps))
    _share_rows_kernel[(1,)](
        logprobs, *logprobs.stride(), lens, starts, rows, bs, steps, len(lens),
        LANES=lanes, REQUESTS=requests, KEY_BITS=_KEY_BITS, num_warps=min(16, requests * lanes // 256),
    )  # fmt: skip


@triton.jit(do_not_specialize=["request_stride", "step_stride", "rows", "bs", "steps", "slots"])
def _share_rows_kernel(
    logprobs_ptr, request_stride, step_stride, lens_ptr, starts_ptr, rows, bs, steps, slots,
    LANES: tl.constexpr, REQUESTS: tl.constexpr, KEY_BITS: tl.constexpr,
):  # fmt: skip
    request = tl.arange(0, REQUESTS)
    lane = tl.arange(0, LANES)
    there = (request < bs)[:, None] & (lane < steps)[None, :]
    at = request[:, None] * request_stride + lane[None, :] * step_stride
    survival = tl.cumsum(tl.load(logprobs_ptr + at, mask=there, other=0.0), axis=1)
    # Integers in the order of the floats, none of them negative: 0 for what is not there.
    bits = (survival + 0.0).to(tl.int32, bitcast=True)
    key = sortable(bits).to(tl.int64) + 2147483648 + 1
    key = tl.where(there, key, 0)
    wanted = rows - bs
    # The largest key that at least `wanted` proposals reach, bit by bit.
    least = tl.zeros((), tl.int64)
    one = least + 1
    for bit in range(KEY_BITS + 1):
        candidate = least + (one << (KEY_BITS - bit))
        reach = tl.sum(tl.sum((key >= candidate).to(tl.int32), axis=1), axis=0)
        least = tl.where(reach >= wanted, candidate, least)
    above = key > least
    equal = there & (key == least)
    missing = wanted - tl.sum(tl.sum(above.to(tl.int32), axis=1), axis=0)
    of_request = tl.sum(equal.to(tl.int32), axis=1)
    before = tl.cumsum(of_request, axis=0) - of_request
    taken = tl.minimum(tl.maximum(missing - before, 0), of_request)
    lens = tl.where(request < bs, 1 + tl.sum(above.to(tl.int32), axis=1) + taken, 0)
    ends = tl.cumsum(lens, axis=0)
    tl.store(lens_ptr + request, lens, mask=request < slots)
    tl.store(starts_ptr + request, ends - lens, mask=request <= slots)
