"""The target's logits of verified rows: a rank's shard, in the head's dtype, until something asks for more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_sglang.kernels.head.pack_shard import best_ids
from dflash_sglang.models.head.target_head import TargetHead, find_head, is_dense
from dflash_sglang.patches import half_precision_rows
from dflash_sglang.sglang_names.scheduler import LogitsProcessor

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class TargetLogits:
    """Greedy verification needs each row's best token alone: one gather of packed tokens finds it in shards, and
    in logits of the head's dtype it is the one that it is in float32.

    Made before the target's graphs are captured: it takes the gather of whole logits out of its verify forwards.
    Out of their graphs it takes the copy to float32, where the product with a dense head is all that makes the
    logits. Prefill keeps both, and so do a head that data-parallel ranks share and SGLang's all-to-all.
    """

    def __init__(self, target: ModelRunner) -> None:
        self._vocab_size = target.model_config.vocab_size
        self._head: TargetHead | None = None  # of this rank's shard, None where ranks have the whole vocabulary
        self._form: tuple[int, torch.dtype] | None = None  # columns and dtype of whole logits in graphs
        processors = [module for module in target.model.modules() if isinstance(module, LogitsProcessor)]
        if len(processors) != 1 or not _is_of_own_rows(processors[0]):
            return
        self._processor: Any = processors[0]
        capped = self._processor.final_logit_softcapping or self._processor.use_fp32_lm_head
        wide = capped or self._processor.use_fp32_lm_head_output
        self._is_product = not wide and _is_plain(self._processor)
        if self._processor.do_tensor_parallel_all_gather:
            self._head = TargetHead(find_head(target.model))
            # What a shard's values are exact in: SGLang widens them after the head.
            given = target.dtype if self._head.quantised else self._head.lm_head.weight.dtype
            self._dtype = torch.float32 if wide else given
        self._processor._get_logits = self._of_verify(self._processor._get_logits)

    def best(self, logits: Tensor) -> Tensor:
        """logits [rows, at least vocab or a shard of it] of a verify forward -> ids [rows] int64 of the largest,
        the lowest id among equals. Collective over the head's group; capturable in a CUDA graph."""
        if self._head is None or not self._is_shard(logits):
            return best_ids(logits[:, : self._vocab_size])
        return self._head.best(logits[:, : self._head.rows])

    def whole(self, logits: Tensor, as_given: bool = False) -> Tensor:
        """logits as of `best` -> [rows, vocab] float32. Narrower ones of a whole vocabulary are overwritten by it.
        Collective over the head's group for a shard.

        as_given: leaves logits of the whole vocabulary in the dtype that they have.
        """
        if self._head is not None and self._is_shard(logits):
            return self._gathered(logits)
        if self._form is None or logits.dtype == torch.float32:
            return logits
        return logits[:, : self._vocab_size] if as_given else half_precision_rows.widen(logits, self._vocab_size)

    def examples(self, rows: int, device: torch.device) -> list[Tensor]:
        """Zeros [rows, vocab] in every form that `whole` gives. Once the target's graphs exist, if it has any."""
        buffer = torch.zeros((rows, self._vocab_size), device=device)
        if self._form is None:
            return [buffer]
        placed = half_precision_rows.place(buffer, *self._form)
        assert placed is not None  # as in the graphs
        return [placed[:, : self._vocab_size], half_precision_rows.widen(placed, self._vocab_size)]

    def _gathered(self, shard: Tensor) -> Tensor:
        shard = shard.to(self._dtype)
        if self._processor.use_attn_tp_group:
            gathered = self._processor._gather_attn_tp_logits(shard)
        else:
            gathered = self._processor._logits_gatherer(shard)
        # SGLang's grammar kernel takes the number of columns for the stride of rows.
        return gathered[:, : self._vocab_size].float().contiguous()

    def _is_shard(self, logits: Tensor) -> bool:
        return logits.shape[1] < self._vocab_size

    def _of_verify(self, get_logits: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """SGLang's method, but for verify forwards."""
        gathers = self._processor.do_tensor_parallel_all_gather

        def of_this_rank(hidden_states: Any, lm_head: Any, metadata: Any, *args: Any, **kwargs: Any) -> Tensor:
            if not metadata.forward_mode.is_target_verify():
                return get_logits(hidden_states, lm_head, metadata, *args, **kwargs)
            buffer = metadata.next_token_logits_buffer  # None outside of graphs
            if buffer is not None and not (args or kwargs):
                placed = self._product(hidden_states, lm_head, buffer)
                if placed is not None:
                    return placed
            self._processor.do_tensor_parallel_all_gather = False
            try:
                return get_logits(hidden_states, lm_head, metadata, *args, **kwargs)
            finally:
                self._processor.do_tensor_parallel_all_gather = gathers

        return of_this_rank

    @torch.no_grad()
    def _product(self, hidden: Tensor, lm_head: Any, buffer: Tensor) -> Tensor | None:
        """hidden [rows, hidden], buffer [rows, vocab] float32 -> logits [rows, rows of the head's weight] in its
        dtype and the buffer's memory, None where SGLang is to make them."""
        if not (self._is_product and is_dense(lm_head) and buffer.shape == (len(hidden), self._vocab_size)):
            return None
        weight = lm_head.weight
        if self._head is None and len(weight) < self._vocab_size:
            return None  # a shard that its model gathers
        placed = half_precision_rows.place(buffer, len(weight), weight.dtype)
        if placed is None:
            return None
        torch.mm(hidden.to(weight.dtype), weight.T, out=placed)
        if self._processor.logit_scale is not None:
            placed.mul_(self._processor.logit_scale)
        if self._head is None and weight.dtype != torch.float32:
            self._form = len(weight), weight.dtype
        return placed


def _is_of_own_rows(processor: Any) -> bool:
    """Whether a rank's logits are of its own rows: all of them, or shards that ranks with the same rows gather."""
    return not (processor.do_tensor_parallel_all_gather_dp_attn or processor.use_tp_lm_head_all_to_all)


def _is_plain(processor: Any) -> bool:
    """Whether SGLang multiplies with a dense head in its dtype, as for any model."""
    return (
        type(processor)._compute_lm_head is LogitsProcessor._compute_lm_head
        and processor.rl_on_policy_target is None
    )
