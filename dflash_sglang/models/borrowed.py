"""What a draft takes of its target: the embedding, and the head, unless its checkpoint holds its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from dflash_sglang.models.block_embedding import BlockEmbedding
from dflash_sglang.models.head.draft_head import HeadCopy
from dflash_sglang.models.head.target_head import TargetHead

if TYPE_CHECKING:
    from dflash_sglang.checkpoint import DraftSpec
    from dflash_sglang.checkpoint.mtp import MtpSpec


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

    def post_load_weights(self) -> None:
        """Called by the loaders that fill the parameters without `load_weights` (dummy, sharded state)."""
        self._loaded = True

    def _bound(self) -> Borrowed:
        if self.borrowed is None:
            raise RuntimeError("The draft has not borrowed of its target yet: call bind_target first.")
        return self.borrowed
