"""What verify and drafting ask of an attention backend of SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class VerifyingBackend(Protocol):
    """An attention backend in SGLang's mode TARGET_VERIFY: a block of new rows for each request, after its prefix.

    The batch has `seq_lens` [bs], the prefixes without the block, and the block's width in
    `spec_info.draft_token_num`. A ragged step has its own number of rows for each request:
    `spec_info.ragged_verify_layout.verify_lens` [bs] int32.

    A target's row sees its request's prefix and the block up to itself. A draft's row sees what its layer's config
    names: all rows of the block, in most drafts.
    """

    supports_ragged_verify_graph: bool

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the forward, once for all layers."""

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: ForwardBatch, save_kv_cache: bool = True
    ) -> Tensor:
        """Write keys and values to the batch's `out_cache_loc` [rows], then attend.

        q [rows, heads * head_dim], k [rows, kv_heads, head_dim], v alike -> [rows, heads * v_head_dim].
        """
