"""The target's logits of verified rows: a rank's shard of the vocabulary until something asks for all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflash_sglang.compat import LogitsProcessor
from dflash_sglang.kernels.pack_shard import merge_shards, pack_shard
from dflash_sglang.models.heads import TargetHead, find_head

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class TargetLogits:
    """Greedy verification needs each row's best token alone, which one gather of packed tokens finds.

    Made before the target's graphs are captured: it takes the gather of whole logits out of its verify forwards.
    Prefill keeps it, and so do a head that data-parallel ranks share and SGLang's all-to-all.
    """

    def __init__(self, target: ModelRunner) -> None:
        self._vocab_size = target.model_config.vocab_size
        self._head: TargetHead | None = None
        processors = [module for module in target.model.modules() if isinstance(module, LogitsProcessor)]
        if len(processors) == 1 and _gathers_for_one_batch(processors[0]):
            self._processor: Any = processors[0]
            self._head = TargetHead(find_head(target.model))
            # What a shard's values are exact in: SGLang widens them after the head.
            capped = self._processor.final_logit_softcapping or self._processor.use_fp32_lm_head
            wide = capped or self._processor.use_fp32_lm_head_output
            self._dtype = torch.float32 if wide else target.dtype
            self._processor._get_logits = self._without_gather(self._processor._get_logits)

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [rows, vocab or a shard of it] of a verify forward -> ids [rows] int64 of the largest, the lowest
        id among equals. Collective over the head's group; capturable in a CUDA graph."""
        if self._head is None or not self._is_shard(logits):
            return merge_shards(pack_shard(logits, first_id=0)[None])
        return self._head.best(logits[:, : self._head.rows])

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """logits as of `best` -> [rows, vocab] float32. Collective over the head's group for a shard."""
        if self._head is None or not self._is_shard(logits):
            return logits
        shard = logits.to(self._dtype)
        if self._processor.use_attn_tp_group:
            gathered = self._processor._gather_attn_tp_logits(shard)
        else:
            gathered = self._processor._logits_gatherer(shard)
        return gathered[:, : self._vocab_size].float()

    def _is_shard(self, logits: torch.Tensor) -> bool:
        return logits.shape[1] < self._vocab_size

    def _without_gather(self, get_logits: Any) -> Any:
        def of_this_rank(hidden_states: Any, lm_head: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            processor = self._processor
            processor.do_tensor_parallel_all_gather = not metadata.forward_mode.is_target_verify()
            try:
                return get_logits(hidden_states, lm_head, metadata, *args, **kwargs)
            finally:
                processor.do_tensor_parallel_all_gather = True

        return of_this_rank


def _gathers_for_one_batch(processor: Any) -> bool:
    """Whether ranks with the same rows gather their logits, each a shard of the vocabulary."""
    return (
        processor.do_tensor_parallel_all_gather
        and not processor.do_tensor_parallel_all_gather_dp_attn
        and not processor.use_tp_lm_head_all_to_all
    )
