"""What the step asks of the draft's context: keep the rows that the target has seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan


class ContextWriter(Protocol):
    """Takes over the target's hidden states of T tokens, so that later blocks see these tokens.

    The step writes every verified row, accepted or not. The next block starts at the first row that was not
    committed, and overwrites the rest before anything reads it.

    features [T, layers * hidden]: the captured layers, side by side in the checkpoint's order.
    positions [T] int64.
    """

    def write(self, features: Tensor, positions: Tensor, slots: Tensor, requests: Tensor) -> None:
        """Keep the rows of `slots` [T] int64, as the draft's own pool names them. requests [bs]: rows of
        req_to_token. Capturable in a CUDA graph: the tail of the target's verify graph."""

    def write_planned(self, features: Tensor, positions: Tensor, plan: KVLocPlan) -> None:
        """The same for the slots that the plan of a verify without a graph writes."""

    def write_prefill(
        self, features: Tensor, positions: Tensor, plan: KVLocPlan, batch: ScheduleBatch, last_tokens: Tensor
    ) -> None:
        """The same of a prefill, request after request. last_tokens [bs] int64: sampled after it; of no meaning
        where a request's prompt goes on."""


class Projection:
    """Keys and values of context rows, of all layers. Weights are the layers' own, or a copy to be refreshed."""

    def project(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """rows [T, hidden] -> [T, layers, 2 * kv_size], contiguous, K before V; before k_norm and RoPE.

        Into `out` of this shape where it is given and the form can.
        """
        raise NotImplementedError

    def refresh(self) -> None:
        """Take over the layers' present weights."""
