"""SGLang's built-in DFLASH worker with accept lengths that a coin of each request decides: for benchmarks.

COINS='[0.9, 0.85, ...]' python -m bench.coins FLAGS...        (the flags of `sglang.launch_server`)

SGLANG_SIMULATE_ACC_LEN forces one accept length on all requests of a step, so that requests of one length end
together. This package's `simulated_acceptance` draws a length for each request. Here the built-in worker draws its
lengths by the same rule: in its accept kernel's place runs one that tosses the coins and writes the same outputs.
So a forced step launches as many kernels as a real one, as in this package.

SGLang starts its processes by importing this module again, so every one of them has the other kernel.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence

import sglang.srt.speculative.dflash_worker_v2 as built_in
import triton
import triton.language as tl
from torch import Tensor

from dflash_sglang.kernels.block.accept import COIN_BITS, GOLDEN
from dflash_sglang.verify.simulate import FIXED_TOKEN_ID, forced_acceptance

COINS_ENV = "COINS"
REPLACED = "_compute_dflash_accept_bonus_triton_unchecked"


class Coins:
    """Draws accept lengths; called as the built-in worker's accept kernel.

    profile: P(proposal 1, 2, ... is accepted once those before it are), one for each proposal of a block.
    """

    def __init__(self, profile: Sequence[float]) -> None:
        self._profile = profile
        self._survival: Tensor | None = None  # on the device of the first step

    def __call__(
        self,
        *,
        candidates: Tensor,  # [bs, block]
        target_top1: Tensor,  # [bs, block]
        accept_lens_out: Tensor,  # [bs] int32, as the next two
        commit_lens_out: Tensor,
        bonus_ids_out: Tensor,  # [bs] int64
        out_tokens_out: Tensor,  # [bs, block] int64
        prefix_lens: Tensor,  # [bs]
        new_seq_lens_out: Tensor,  # [bs] int64
    ) -> None:
        bs, block = candidates.shape
        if len(self._profile) != block - 1:
            raise SystemExit(f"{COINS_ENV}: {len(self._profile)} probabilities, expected {block - 1}")
        if self._survival is None:
            forced = forced_acceptance(block, [self._profile], str(candidates.device))
            assert forced is not None
            self._survival = forced.survival[0]
        _draw_kernel[(bs,)](
            self._survival, prefix_lens,
            accept_lens_out, commit_lens_out, bonus_ids_out, out_tokens_out, new_seq_lens_out,
            random.getrandbits(COIN_BITS), out_tokens_out.stride(0),
            BLOCK=block, LANES=triton.next_power_of_2(block),
            SPREAD=GOLDEN, COINS=1 << COIN_BITS, TOKEN_ID=FIXED_TOKEN_ID,
        )  # fmt: skip


@triton.jit(do_not_specialize=["coin"])
def _draw_kernel(
    survival_ptr, prefix_ptr,
    accept_ptr, commit_ptr, bonus_ptr, out_ptr, new_seq_lens_ptr,
    coin, out_stride,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
    SPREAD: tl.constexpr, COINS: tl.constexpr, TOKEN_ID: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mine = (coin.to(tl.int64) + request * SPREAD) % COINS
    survives = mine < tl.load(survival_ptr + lane, mask=lane < BLOCK - 1, other=0)
    accepted = tl.sum(survives.to(tl.int32), axis=0)
    tl.store(accept_ptr + request, accepted)
    tl.store(commit_ptr + request, accepted + 1)
    tl.store(bonus_ptr + request, TOKEN_ID)
    tl.store(out_ptr + request * out_stride + lane, tl.full((LANES,), TOKEN_ID, tl.int64), mask=lane < BLOCK)
    tl.store(new_seq_lens_ptr + request, tl.load(prefix_ptr + request).to(tl.int64) + accepted + 1)


if COINS_ENV in os.environ:
    if not hasattr(built_in, REPLACED):
        raise SystemExit(f"{REPLACED} is not in {built_in.__name__}: coins cannot decide what it accepts")
    setattr(built_in, REPLACED, Coins(json.loads(os.environ[COINS_ENV])))


if __name__ == "__main__":
    from sglang.srt.server_args import prepare_server_args

    if COINS_ENV not in os.environ:
        raise SystemExit(f"{COINS_ENV} is not set: expected the acceptance of each proposal as JSON")
    arguments = prepare_server_args(sys.argv[1:])
    from sglang.launch_server import run_server

    run_server(arguments)
