"""SGLang's built-in DFLASH worker with accept lengths that are forced on each request: for benchmarks.

COINS='[0.9, 0.85, ...]' python -m bench.coins FLAGS...        (the flags of `sglang.launch_server`)
COINS='{"record": PATH}' python -m bench.coins FLAGS...

SGLANG_SIMULATE_ACC_LEN forces one accept length on all requests of a step, so that requests of one length end
together. This package's `simulated_acceptance` has a length for each request, by a coin or by a record. Here the
built-in worker has lengths by the same rule: in its accept kernel's place runs one that looks them up and writes
the same outputs. So a forced step launches as many kernels as a real one, as in this package.

SGLang starts its processes by importing this module again, so every one of them has the other kernel.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import sglang.srt.speculative.dflash_worker_v2 as built_in
import triton
import triton.language as tl
from torch import Tensor

from dflash_sglang.kernels.block.accept import COIN_BITS, GOLDEN, Forced, Recorded
from dflash_sglang.settings.plugin_config import PluginConfig, PluginConfigError, SimulatedAcceptance
from dflash_sglang.verify.simulate import FIXED_TOKEN_ID, forced_acceptance

COINS_ENV = "COINS"
PREPARE, ACCEPT = "_prepare_dflash_draft_block_unchecked", "_compute_dflash_accept_bonus_triton_unchecked"


class Coins:
    """Forces accept lengths, in the place of two functions of the built-in worker's step."""

    def __init__(self, simulated: SimulatedAcceptance, prepare: Callable[..., Any]) -> None:
        """simulated: see `PluginConfig.simulated_acceptance`; prepare: what `prepare` is in the place of."""
        self._simulated, self._prepare = simulated, prepare
        self._requests: Tensor | None = None  # [bs] rows of req_to_token, of the step that runs
        self._rows = 0  # of req_to_token
        self._forced: Forced | Recorded | None = None  # on the device of the first step

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
                self._forced = forced_acceptance(block, self._simulated, self._rows, str(candidates.device))
            except ValueError as error:
                raise SystemExit(f"{COINS_ENV}: {error}") from error
            assert self._forced is not None
        forced = self._forced
        if isinstance(forced, Recorded):
            decides, places = forced.accepted, forced.offsets
        else:
            decides, places = forced.survival, self._requests
        _force_kernel[(bs,)](
            decides, places, self._requests, prefix_lens,
            accept_lens_out, commit_lens_out, bonus_ids_out, out_tokens_out, new_seq_lens_out,
            random.getrandbits(COIN_BITS), out_tokens_out.stride(0),
            RECORDED=isinstance(forced, Recorded), CASES=len(decides),
            BLOCK=block, LANES=triton.next_power_of_2(block),
            SPREAD=GOLDEN, COINS=1 << COIN_BITS, TOKEN_ID=FIXED_TOKEN_ID,
        )  # fmt: skip


def coins_of(source: str) -> Coins:
    """From a value of COINS: what `simulated_acceptance` is in the settings of this package."""
    try:
        settings = PluginConfig.from_mapping({"simulated_acceptance": json.loads(source)})
    except (json.JSONDecodeError, PluginConfigError) as error:
        raise SystemExit(f"{COINS_ENV}={source!r}: {error}") from error
    assert settings.simulated_acceptance is not None
    return Coins(settings.simulated_acceptance, getattr(built_in, PREPARE))


@triton.jit(do_not_specialize=["coin"])
def _force_kernel(
    forced_ptr, places_ptr, requests_ptr, prefix_ptr,
    accept_ptr, commit_ptr, bonus_ptr, out_ptr, new_seq_lens_ptr,
    coin, out_stride,
    RECORDED: tl.constexpr, CASES: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    SPREAD: tl.constexpr, COINS: tl.constexpr, TOKEN_ID: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    row = tl.load(requests_ptr + request).to(tl.int64)
    if RECORDED:
        # The worker accepts once a step, so that the place itself is kept: it is where the next block begins.
        place = tl.load(places_ptr + row)
        accepted = tl.minimum(tl.load(forced_ptr + place), BLOCK - 1).to(tl.int32)
        tl.store(places_ptr + row, (place + accepted + 1) % CASES)
    else:
        mine = (coin.to(tl.int64) + request * SPREAD) % COINS
        survives = mine < tl.load(forced_ptr + row % CASES * (BLOCK - 1) + lane, mask=lane < BLOCK - 1, other=0)
        accepted = tl.sum(survives.to(tl.int32), axis=0)
    tl.store(accept_ptr + request, accepted)
    tl.store(commit_ptr + request, accepted + 1)
    tl.store(bonus_ptr + request, TOKEN_ID)
    tl.store(out_ptr + request * out_stride + lane, tl.full((LANES,), TOKEN_ID, tl.int64), mask=lane < BLOCK)
    tl.store(new_seq_lens_ptr + request, tl.load(prefix_ptr + request).to(tl.int64) + accepted + 1)


if COINS_ENV in os.environ:
    for replaced in (PREPARE, ACCEPT):
        if not hasattr(built_in, replaced):
            raise SystemExit(f"{replaced} is not in {built_in.__name__}: its accept lengths cannot be forced")
    coins = coins_of(os.environ[COINS_ENV])
    setattr(built_in, PREPARE, coins.prepare)
    setattr(built_in, ACCEPT, coins.accept)


if __name__ == "__main__":
    from sglang.srt.server_args import prepare_server_args

    if COINS_ENV not in os.environ:
        raise SystemExit(f"{COINS_ENV} is not set: expected `simulated_acceptance` as JSON")
    arguments = prepare_server_args(sys.argv[1:])
    from sglang.launch_server import run_server

    run_server(arguments)
