"""SGLang's built-in DFLASH worker with accept lengths that are forced on each request: for benchmarks.

DFLASH_SGLANG_FORCED='[0.9, 0.85, ...]' python -m bench.coins FLAGS...   (the flags of `sglang.launch_server`)
DFLASH_SGLANG_FORCED='{"record": PATH}' python -m bench.coins FLAGS...

SGLANG_SIMULATE_ACC_LEN forces one accept length on all requests of a step, so that requests of one length end
together. DFLASH_SGLANG_FORCED gives each request a length of its own, by a coin or by a record. Here the
built-in worker has lengths by the same rule: in its accept kernel's place runs one that looks them up and writes
the same outputs: a forced step launches as many kernels as a real one.

SGLang starts its processes by importing this module again, so every one of them has the other kernel.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import sglang.srt.speculative.dflash_worker_v2 as built_in
import triton
import triton.language as tl
from torch import Tensor

from dflash_sglang.bench.forced.answers import TOKEN_ID, Profiles, Recorded, forced_by
from dflash_sglang.settings.plugin_config import FORCED_ENV, PluginConfigError

PREPARE, ACCEPT = "_prepare_dflash_draft_block_unchecked", "_compute_dflash_accept_bonus_triton_unchecked"


class Coins:
    """Forces accept lengths, in the place of two functions of the built-in worker's step."""

    def __init__(self, source: str, prepare: Callable[..., Any]) -> None:
        """source: a value of DFLASH_SGLANG_FORCED; prepare: what `prepare` is in the place of."""
        self._source, self._prepare = source, prepare
        self._requests: Tensor | None = None  # [bs] rows of req_to_token, of the step that runs
        self._rows = 0  # of req_to_token
        self._forced: Profiles | Recorded | None = None  # on the device of the first step

    def prepare(self, *, req_pool_indices: Tensor, req_to_token: Tensor, **block: Any) -> Any:
        """Called as what prepares a step's blocks: notes whose they are."""
        self._requests, self._rows = req_pool_indices, len(req_to_token)
        return self._prepare(req_pool_indices=req_pool_indices, req_to_token=req_to_token, **block)

    def accept(
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
        """Called as the accept kernel. Ends the process where it cannot force: the worker would go on without."""
        bs, block = candidates.shape
        if self._requests is None:
            raise SystemExit(f"{PREPARE} was not called before {ACCEPT}: whose blocks these are is not known")
        if self._forced is None:
            try:
                self._forced = forced_by(self._source, block, self._rows, str(candidates.device))
            except PluginConfigError as error:
                raise SystemExit(str(error)) from error
        recorded = isinstance(self._forced, Recorded)
        _force_kernel[(bs,)](
            self._forced.accepted if recorded else self._forced.survival,
            self._forced.offsets, self._requests, prefix_lens,
            accept_lens_out, commit_lens_out, bonus_ids_out, out_tokens_out, new_seq_lens_out,
            random.random(), out_tokens_out.stride(0),
            RECORDED=recorded, CASES=len(self._forced.accepted) if recorded else 0,
            BLOCK=block, LANES=triton.next_power_of_2(block), TOKEN_ID=TOKEN_ID,
        )  # fmt: skip


@triton.jit
def _force_kernel(
    forced_ptr, offsets_ptr, requests_ptr, prefix_ptr,
    accept_ptr, commit_ptr, bonus_ptr, out_ptr, new_seq_lens_ptr,
    coin, out_stride,
    RECORDED: tl.constexpr, CASES: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TOKEN_ID: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    row = tl.load(requests_ptr + request).to(tl.int64)
    if RECORDED:
        # The worker accepts once a step, so that the place itself is kept: it is where the next block begins.
        place = tl.load(offsets_ptr + row)
        accepted = tl.minimum(tl.load(forced_ptr + place), BLOCK - 1).to(tl.int32)
        tl.store(offsets_ptr + row, (place + accepted + 1) % CASES)
    else:
        mine = tl.load(offsets_ptr + row) + coin
        mine -= tl.floor(mine)
        survives = mine < tl.load(forced_ptr + row * BLOCK + lane, mask=(lane > 0) & (lane < BLOCK), other=-1.0)
        accepted = tl.sum(survives.to(tl.int32), axis=0)
    tl.store(accept_ptr + request, accepted)
    tl.store(commit_ptr + request, accepted + 1)
    tl.store(bonus_ptr + request, TOKEN_ID)
    tl.store(out_ptr + request * out_stride + lane, tl.full((LANES,), TOKEN_ID, tl.int64), mask=lane < BLOCK)
    tl.store(new_seq_lens_ptr + request, tl.load(prefix_ptr + request).to(tl.int64) + accepted + 1)


if FORCED_ENV in os.environ:
    for replaced in (PREPARE, ACCEPT):
        if not hasattr(built_in, replaced):
            raise SystemExit(f"{replaced} is not in {built_in.__name__}: its accept lengths cannot be forced")
    coins = Coins(os.environ[FORCED_ENV], getattr(built_in, PREPARE))
    setattr(built_in, PREPARE, coins.prepare)
    setattr(built_in, ACCEPT, coins.accept)


if __name__ == "__main__":
    from sglang.srt.server_args import prepare_server_args

    if FORCED_ENV not in os.environ:
        raise SystemExit(f"{FORCED_ENV} is not set: expected a list of probabilities, or a record")
    arguments = prepare_server_args(sys.argv[1:])
    from sglang.launch_server import run_server

    run_server(arguments)
