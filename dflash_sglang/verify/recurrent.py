"""Recurrent states of the target: a verify commits those of the accepted rows only.

A verify forward leaves every request's state as it was. (The window of a convolution moves on in place. The commit
sets it back, so a verify without a commit spoils it.) Once the accept is known, the state after the last accepted
row becomes the request's: with gated delta nets the accepted rows are replayed (`patches.replayed_states`), with
other kinds the verify has kept the state after each of its rows. Where the accepted rows cross a boundary of the
prefix cache's grid, the state at the boundary goes to the slot that the cache takes when the request ends or hands
its prefix on. SGLang picks that slot (`prepare_for_verify`).

Of states that are kept, some kernels look for those of the next request as many rows further on as the buffer has
rows for a request, others as many as the step verifies. `states_of_width` gives each width a form of the buffer in
which both are the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from dflash_sglang.patches.replayed_states import ReplayPool
from dflash_sglang.settings.width import PLAIN
from dflash_sglang.sglang_names.scheduler import (
    MambaPool,
    ModelRunner,
    ScheduleBatch,
    TpModelWorker,
    commit_mamba_states_after_verify,
    envs,
    get_exec,
    get_memory,
    get_schedule,
    mamba_track_grid,
    mambaish_config,
    track_mamba_states_all_layers,
)
from dflash_sglang.startup.facts import Problem, StartupError

if TYPE_CHECKING:  # it imports kernels of recurrent layers
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

_UNWRITTEN = 2.0**15  # exact in every dtype of states


class RecurrentStates:
    """The states of a target whose pools and attention backends exist."""

    def __init__(self, target_worker: TpModelWorker, block_size: int) -> None:
        """block_size: of the widest blocks."""
        self._worker = target_worker
        runner = target_worker.model_runner
        max_requests = runner.req_to_token_pool.req_to_token.shape[0]
        # SGLang commits along a tree of proposals: here row i follows row i - 1.
        self._rows = torch.arange(max_requests * block_size, device=runner.device)
        self._replays = replays(runner)

    @classmethod
    def from_target(cls, target_worker: TpModelWorker, block_size: int) -> RecurrentStates | None:
        """None for a target without recurrent layers. Raises StartupError where states cannot be committed."""
        runner = target_worker.model_runner
        if mambaish_config(runner.model_config) is None:
            return None
        # Without this method SGLang's commit does nothing.
        if not hasattr(runner.attn_backend, "update_mamba_state_after_mtp_verify"):
            raise StartupError([_problem_of_backend(type(runner.attn_backend).__name__)])
        if not isinstance(runner.req_to_token_pool.mamba_pool.mamba_cache, MambaPool.SpeculativeState):
            raise StartupError([_problem_of_backend("a state pool without a state per verified row")])
        mamba = get_exec().mamba
        if mamba.enable_mamba_extra_buffer:
            grid = mamba_track_grid(runner.page_size)
            # Two steps in flight write to one slot: the second must not cross a boundary that follows the first's.
            if grid < 2 * block_size:
                raise StartupError([_problem_of_grid(mamba.mamba_track_interval, grid, block_size)])
        elif not (get_memory().disable_radix_cache or get_schedule().disable_overlap_schedule):
            # SGLang sees to it for the targets that it knows, and not for Kimi-K3's text model.
            raise StartupError([_problem_of_overlap()])
        return cls(target_worker, block_size)

    def commit(self, batch: ScheduleBatch, commit_lens: torch.Tensor, width: int) -> None:
        """After the verify of `batch`, whose seq_lens are still the prefixes. commit_lens [bs], on the device."""
        if width == PLAIN and self._replays:  # the forward has moved the states on
            self._keep_for_cache(batch)
            return
        bs = commit_lens.shape[0]
        commit_mamba_states_after_verify(
            target_worker=self._worker,
            batch=batch,
            accept_lens=commit_lens,
            accept_index=self._rows[: bs * width].view(bs, width),
            draft_token_num=width,
        )

    def _keep_for_cache(self, batch: ScheduleBatch) -> None:
        """Copies the states of requests that are at a boundary of the grid, after one token of each."""
        slots = batch.mamba_track_indices
        if slots is None:
            return
        runner = self._worker.model_runner
        pool = runner.req_to_token_pool
        states = pool.mamba_pool.mamba_cache
        at_boundary = (batch.seq_lens + 1) % mamba_track_grid(runner.page_size) == 0
        # As many as the most requests: SGLang compiles its kernel for each number.
        own, masked, kept = (
            pad(rows, (0, pool.size - len(slots)))
            for rows in (pool.get_mamba_indices(batch.req_pool_indices), at_boundary & (slots >= 0), slots)
        )
        for conv in states.conv:
            track_mamba_states_all_layers(conv, states.temporal, own, masked, kept, pool.size)


def replays(runner: ModelRunner) -> bool:
    """Whether a runner's commits replay accepted rows; its pools exist."""
    return isinstance(getattr(runner.req_to_token_pool, "mamba_pool", None), ReplayPool)


def states_of_width(runner: ModelRunner, width: int) -> Any:
    """The `MambaPool.SpeculativeState` of steps of this width: the runner's own, with the states of verified rows
    packed to `intermediate_ssm` [layers, requests + 1, width, ...]. None for a runner that keeps none: without
    recurrent layers, or where accepted rows are replayed.

    All widths share memory: the states live from a verify to the commit of the same step. Call it while the
    widest blocks' is in use.
    """
    if mambaish_config(runner.model_config) is None:
        return None
    states = runner.req_to_token_pool.mamba_pool.mamba_cache
    if states.intermediate_ssm is None:
        return None
    layers, requests, _, *shape = states.intermediate_ssm.shape
    packed = (layers, requests, width, *shape)
    rows = states.intermediate_ssm.view(-1)[: math.prod(packed)]
    return replace(states, intermediate_ssm=rows.view(packed))


def only_one_width(backend: HybridLinearAttnBackend) -> str | None:
    """Why the steps of a target with this attention backend have one width only; None if they have several."""
    if backend.linear_attn_backend.accept_lens_pool is not None:
        return "the kernel of the target's recurrent layers hands accepted states on from step to step by itself"
    if envs.SGLANG_ENABLE_PP_SPEC.get():
        return "SGLANG_ENABLE_PP_SPEC keeps the target's recurrent states by request"
    return None


def keeps_apart(states: Any, requests: int, step: Callable[[], object]) -> bool:
    """Whether a `step` of so many requests writes the states of all its rows where `states` has them.

    states: `states_of_width`. A kernel that counts fewer or more rows for a request leaves one of them unwritten.
    """
    marks = states.intermediate_ssm[:, :requests].flatten(3)[..., :1]  # one number of each state
    marks.fill_(_UNWRITTEN)
    step()
    return not bool((marks == _UNWRITTEN).any())


def kernel_of(backend: HybridLinearAttnBackend) -> str:
    """The name of what verifies the recurrent layers."""
    linear = backend.linear_attn_backend
    return type(getattr(getattr(linear, "kernel_dispatcher", None), "verify_kernel", linear)).__name__


def _problem_of_backend(found: str) -> Problem:
    return Problem(
        "target's linear-attention backend",
        found,
        "one that keeps a recurrent state for every verified row",
        "Remove the flags that choose the linear-attention backend, or serve without speculation.",
    )


def _problem_of_overlap() -> Problem:
    return Problem(
        "--disable-overlap-schedule",
        False,
        "set: without a buffer for it, the prefix cache would keep a state that the next step has moved on",
        "Set --disable-overlap-schedule, or --disable-radix-cache.",
    )


def _problem_of_grid(interval: int, grid: int, block_size: int) -> Problem:
    return Problem(
        "--mamba-track-interval",
        interval,
        f"states of the prefix cache at least two blocks ({2 * block_size} tokens) apart, not {grid}",
        f"Set --mamba-track-interval to a multiple of 64 from {-(-2 * block_size // 64) * 64} on.",
    )
