"""A window imposed on the draft: its attention sees a request's first and latest context tokens, and the block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from dflash_sglang.drafting.block import Block
from dflash_sglang.kernels.block.window_rows import RingSlots, Span, WindowRows, window_rows
from dflash_sglang.sglang_names.scheduler import get_spec


def is_imposed() -> bool:
    """Whether the launch asks for a window, --speculative-draft-window-size."""
    return get_spec().speculative_draft_window_size is not None


class Seen(NamedTuple):
    """Lengths of a batch as a windowed draft sees them."""

    prefix_lens: torch.Tensor  # [bs]
    kv_len_bounds: torch.Tensor  # [bs] on the host: no request's prefix + block is longer
    prefix_bounds_sum: int  # of these, without the blocks


class DraftWindow:
    """The draft's own slot table, in which a request's row is cut to what the window leaves.

    Every row of a block sees the same context: the last committed tokens and the first ones (the sinks), both in
    whole pages (so up to page_size - 1 tokens more of each), and the whole block besides. Layers with a window
    of their own see the part of this that lies in it. Keys keep the positions that they were rotated with.
    """

    def __init__(self, span: Span, source: torch.Tensor | RingSlots, draft_table: torch.Tensor) -> None:
        """source: of the slots, req_to_token of the target or rings. draft_table [max_requests, row_width] int32:
        req_to_token of the draft."""
        self.span, self._source, self._draft_table = span, source, draft_table
        self._prefix_lens = torch.empty(draft_table.shape[0], dtype=torch.int64, device=draft_table.device)

    @classmethod
    def imposed(cls, page_size: int, target_table: torch.Tensor, draft_table: torch.Tensor) -> DraftWindow | None:
        """The window of the launch, --speculative-draft-window-size and --speculative-draft-sink-size, if any."""
        if not is_imposed():
            return None
        size, sinks = get_spec().speculative_draft_window_size, get_spec().speculative_draft_sink_size or 0
        return cls(Span(size, -(-sinks // page_size) * page_size, page_size), target_table, draft_table)

    def cut(self, block: Block) -> Seen:
        """Writes the batch's rows of the draft's table; one launch.

        FlashInfer splits the keys of a request by the host's length, and joins the parts by the device's: lengths
        that the host knows exactly stay exact.
        """
        out = WindowRows(self._draft_table, self._prefix_lens[: block.batch_size])
        window_rows(self._source, block.requests, block.prefix_lens, block.size, self.span, out)
        whole = block.kv_len_bounds.numpy()
        if block.exact:
            bounds = whole - self.span.left_out(whole - block.size, self._low(block))
        else:
            bounds = np.minimum(whole, self.span.widest(block.size))
        return Seen(out.prefix_lens, torch.from_numpy(bounds), int(bounds.sum()) - bounds.size * block.size)

    def _low(self, block: Block) -> np.ndarray | int:
        """The first position of each request [bs] that the draft has keys and values of."""
        return 0
