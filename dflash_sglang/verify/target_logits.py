"""What a verify reads of the target's logits: the best token of a row, or whole rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dflash_sglang.kernels.head.pack_shard import best_ids
from dflash_sglang.models.head.target_head import TargetHead, find_head
from dflash_sglang.patches.verify_shards import keep_shards
from dflash_sglang.sglang_names.scheduler import LogitsProcessor, ModelRunner


class TargetLogits:
    """Reads the logits of verified rows, which may be a rank's shard.

    Make it before the target's graphs are captured: `patches/verify_shards.py` changes what they give.
    """

    def __init__(self, target: ModelRunner) -> None:
        self._vocab_size = target.model_config.vocab_size
        self._head: TargetHead | None = None  # of this rank's shard, None where ranks have the whole vocabulary
        processors = [module for module in target.model.modules() if isinstance(module, LogitsProcessor)]
        if len(processors) == 1 and keep_shards(processors[0]):
            self._processor: Any = processors[0]
            self._head = TargetHead(find_head(target.model))

    def best(self, logits: Tensor) -> Tensor:
        """logits [rows, at least vocab or a shard of it] of a verify forward -> ids [rows] int64 of the largest,
        the lowest id among equals. Collective over the head's group; capturable in a CUDA graph."""
        if self._head is None or not self._is_shard(logits):
            return best_ids(logits[:, : self._vocab_size])
        return self._head.best(logits[:, : self._head.rows])

    def whole(self, logits: Tensor) -> Tensor:
        """logits as of `best` -> [rows, vocab] float32. Collective over the head's group for a shard."""
        if self._head is None or not self._is_shard(logits):
            return logits
        if self._processor.use_attn_tp_group:
            gathered = self._processor._gather_attn_tp_logits(logits)
        else:
            gathered = self._processor._logits_gatherer(logits)
        # SGLang's grammar kernel takes the number of columns for the stride of rows.
        return gathered[:, : self._vocab_size].float().contiguous()

    def _is_shard(self, logits: Tensor) -> bool:
        return logits.shape[1] < self._vocab_size
