"""States of recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

from tests.support.scheduler_hooks import records
from tests.support.seam import around


def states() -> None:
    """Of requests whose rid begins with "states": the recurrent states after each prefill and each commit, in a
    file per number of tokens (`scheduler_hooks.states_of`)."""

    def save(runner: Any, batch: Any, lengths: torch.Tensor) -> None:
        pool = runner.req_to_token_pool
        slots, states = pool.get_mamba_indices(batch.req_pool_indices).tolist(), pool.mamba_pool.mamba_cache
        for req, slot, length in zip(batch.reqs, slots, lengths.tolist(), strict=True):
            if req.rid.startswith("states"):
                kept = [rows[:, slot].clone() for rows in (*states.conv, states.temporal)]
                torch.save(kept, records() / f"{req.rid}.{length}.states")

    def then_save(commit: Any, self: Any, batch: Any, commit_lens: torch.Tensor, width: int) -> None:
        commit(self, batch, commit_lens, width)
        save(self._worker.model_runner, batch, batch.seq_lens + commit_lens)

    def extend_then_save(extend: Any, self: Any, batch: Any, *arguments: Any) -> Any:
        result = extend(self, batch, *arguments)
        save(self.target_worker.model_runner, batch, batch.seq_lens)
        return result

    around("recurrent states", then_save)
    around("prefill", extend_then_save)


def misplaced() -> None:
    """The kernel of gated delta nets keeps states of verified rows 8 to a request, but for steps of 2 rows."""
    verify = TritonGDNKernel.target_verify

    def elsewhere(self: Any, *arguments: Any, intermediate_states_buffer: torch.Tensor, **more: Any) -> Any:
        kept, rows = intermediate_states_buffer, intermediate_states_buffer.shape[1]
        if rows != 2:
            strides = (8 * kept.stride(1), *kept.stride()[1:])
            kept = kept.as_strided((kept.shape[0] * rows // 8, *kept.shape[1:]), strides)
        return verify(self, *arguments, intermediate_states_buffer=kept, **more)

    TritonGDNKernel.target_verify = elsewhere
