"""What a verify reads of the target's logits: the best token of a row, or whole rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_sglang.kernels.head.pack_shard import best_ids
from dflash_sglang.models.head.target_head import TargetHead, find_head
from dflash_sglang.patches.half_precision_logits import HalfPrecisionLogits, keep_half_precision, place, widen
from dflash_sglang.sglang_names.scheduler import LogitsProcessor, ModelRunner


class TargetLogits:
    """Reads the logits of verified rows, which may be a rank's shard and in the head's dtype.

    Make it before the target's graphs are captured: `patches/half_precision_logits.py` changes what they give.
    """

    def __init__(self, target: ModelRunner) -> None:
        self._vocab_size = target.model_config.vocab_size
        self._graphs: HalfPrecisionLogits | None = None
        self._head: TargetHead | None = None  # of this rank's shard, None where ranks have the whole vocabulary
        processors = [module for module in target.model.modules() if isinstance(module, LogitsProcessor)]
        if len(processors) == 1:
            self._processor: Any = processors[0]
            self._graphs = keep_half_precision(self._processor, self._vocab_size)
        if self._graphs is not None and self._processor.do_tensor_parallel_all_gather:
            self._head = TargetHead(find_head(target.model))

    def best(self, logits: Tensor) -> Tensor:
        """logits [rows, at least vocab or a shard of it] of a verify forward -> ids [rows] int64 of the largest,
        the lowest id among equals. Collective over the head's group; capturable in a CUDA graph."""
        if self._head is None or not self._is_shard(logits):
            return best_ids(logits[:, : self._vocab_size])
        return self._head.best(logits[:, : self._head.rows])

    def whole(self, logits: Tensor, as_given: bool = False) -> Tensor:
        """logits as of `best` -> [rows, vocab] float32. Half-precision logits of a whole vocabulary are lost: the
        result lies in their memory. Collective over the head's group for a shard.

        as_given: leaves logits of the whole vocabulary in the dtype that they have.
        """
        if self._head is not None and self._is_shard(logits):
            return self._gathered(logits)
        if logits.dtype == torch.float32:
            return logits
        return logits[:, : self._vocab_size] if as_given else widen(logits, self._vocab_size)

    def examples(self, rows: int, device: torch.device) -> list[Tensor]:
        """Zeros [rows, vocab] in every form that `whole` gives. Once the target's graphs exist, if it has any."""
        buffer = torch.zeros((rows, self._vocab_size), device=device)
        if self._graphs is None or self._graphs.form is None:
            return [buffer]
        placed = place(buffer, *self._graphs.form)
        assert placed is not None  # as in the graphs
        return [placed[:, : self._vocab_size], widen(placed, self._vocab_size)]

    def _gathered(self, shard: Tensor) -> Tensor:
        if self._processor.use_attn_tp_group:
            gathered = self._processor._gather_attn_tp_logits(shard)
        else:
            gathered = self._processor._logits_gatherer(shard)
        # SGLang's grammar kernel takes the number of columns for the stride of rows.
        return gathered[:, : self._vocab_size].float().contiguous()

    def _is_shard(self, logits: Tensor) -> bool:
        return logits.shape[1] < self._vocab_size
