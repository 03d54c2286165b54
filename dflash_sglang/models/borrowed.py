"""What a draft takes of its target: the embedding, and the head, unless its checkpoint holds its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dflash_sglang.models.head.draft_head import HeadCopy
from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.sglang_names.scheduler import DraftParallelSpec, DraftTPExecution, LogitsProcessorOutput

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from dflash_sglang.checkpoint import DraftSpec
    from dflash_sglang.checkpoint.mtp import MtpSpec


@dataclass(frozen=True)
class BlockEmbedding:
    """Block ids -> rows, capturable. No module: a table that is the target's must not become the draft's."""

    table: nn.Module
    scale: float = 1.0  # factor on all rows
    mask_row: Tensor | None = None  # [hidden], in place of the row of `mask_token_id`; the table keeps its own
    mask_token_id: int | None = None
    as_stored: bool = False  # the rows of a table whose module scales them are taken unscaled

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, hidden]"""
        as_stored = self.as_stored and isinstance(self.table, nn.Embedding)
        rows = nn.functional.embedding(ids, self.table.weight) if as_stored else self.table(ids)
        if self.mask_row is not None:
            rows = torch.where((ids == self.mask_token_id)[:, None], self.mask_row.to(rows.dtype), rows)
        return rows if self.scale == 1.0 else rows * self.scale


@dataclass(frozen=True)
class Borrowed:
    """What the draft embeds and proposes with. Held by a plain object, so that the target's modules are no
    submodules of the draft: its state dict and its weight updates must not reach them."""

    embedding: BlockEmbedding
    head: TargetHead
    head_copy: HeadCopy | None  # the head's weights where they are a copy, to be refreshed with what was copied
    head_form: str  # what they are and why, for the start-up line


class BorrowingDraft(nn.Module):
    """What SGLang's runner asks of a draft model. Its `bind_target` sets `borrowed`, once, after loading."""

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    spec: DraftSpec | MtpSpec

    def __init__(self) -> None:
        super().__init__()
        self.borrowed: Borrowed | None = None
        self._loaded = False

    @property
    def head(self) -> TargetHead:
        """The head that proposals come from; of several, the first one's."""
        return self._bound().head

    def get_input_embeddings(self) -> nn.Module:
        return self._bound().embedding.table

    def get_attention_sliding_window_size(self) -> int | None:
        """Keys to the left of a query that a sliding layer sees; None without sliding layers."""
        windows = [layer.window for layer in self.spec.layers if layer.window is not None]
        return max(windows) - 1 if windows else None

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: ForwardBatch,
        input_embeds: Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> LogitsProcessorOutput:
        """One forward, as `drafted`. There are no logits: what proposes is a part of it, or the tail of its graph.

        `get_embedding` and `pp_proxy_tensors` are the runner's and have no meaning for a draft.
        """
        hidden_states = self.drafted(input_ids, positions, forward_batch, input_embeds)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden_states)

    def drafted(
        self, ids: Tensor, positions: Tensor, forward_batch: ForwardBatch, embedded: Tensor | None
    ) -> Tensor:
        """ids and positions [rows] -> hidden states [rows, hidden]. embedded [rows, hidden]: of the ids."""
        raise NotImplementedError

    def post_load_weights(self) -> None:
        """Called by the loaders that fill the parameters without `load_weights` (dummy, sharded state)."""
        self._loaded = True

    def _bound(self) -> Borrowed:
        if self.borrowed is None:
            raise RuntimeError("The draft has not borrowed of its target yet: call bind_target first.")
        return self.borrowed
