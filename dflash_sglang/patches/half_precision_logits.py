"""Logits of verified rows stay in the head's dtype, and on the rank that made them.

SGLang gathers the logits of all ranks and copies them to float32. A greedy accept needs neither: the best token of
a row is the same in the head's dtype, and ranks only need to exchange their best tokens.

On an H200 with Qwen3-8B's shapes and 512 rows the copy takes 0.111 ms, and reading half of the bytes saves another
0.04 ms: together 1 % of a step (`bench/results/step_profile.json`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from dflash_sglang.patches.apply import replace
from dflash_sglang.sglang_names.scheduler import (
    LogitsProcessor,
    cast_to_float32_logits,
    should_apply_lm_head_quant_method,
    unwrap_lora_layer,
)

_HALF = (torch.float16, torch.bfloat16)
_ALIGNMENT = 256  # bytes, as of an allocation: GEMMs are chosen and Triton kernels compiled by it


def keep_half_precision(processor: Any, vocab_size: int) -> HalfPrecisionLogits | None:
    """Replace `_get_logits` of a target's logits processor. Call it before the target's graphs are captured.

    Returns None, and changes nothing, where a rank's logits include rows of other ranks: for a head that
    data-parallel ranks share, and for SGLang's all-to-all.
    """
    if processor.do_tensor_parallel_all_gather_dp_attn or processor.use_tp_lm_head_all_to_all:
        return None
    logits = HalfPrecisionLogits(processor, vocab_size)
    replace("verify-logits", processor, logits)
    return logits


class HalfPrecisionLogits:
    """The method `_get_logits` of a logits processor, with another result for verify forwards.

    In a graph: the product with a dense 16-bit head, in the memory of SGLang's float32 buffer. SGLang makes all
    other logits, in float32, but does not gather them: those of eager forwards, of quantised and adapted heads,
    and logits that are capped or computed in float32.
    """

    def __init__(self, processor: Any, vocab_size: int) -> None:
        self._original = processor._get_logits
        self._vocab_size = vocab_size
        self._gathers = processor.do_tensor_parallel_all_gather
        self._of_rank = copy.copy(processor)
        replace("verify-gather", self._of_rank, False)
        wide = processor.final_logit_softcapping or processor.use_fp32_lm_head or processor.use_fp32_lm_head_output
        own = type(processor)._compute_lm_head is not LogitsProcessor._compute_lm_head
        self._is_product = not (wide or own or processor.rl_on_policy_target is not None)
        self.form: tuple[int, torch.dtype] | None = None  # columns and dtype of whole logits in graphs

    def __call__(self, hidden_states: Tensor, lm_head: Any, metadata: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not metadata.forward_mode.is_target_verify():
            return self._original(hidden_states, lm_head, metadata, *args, **kwargs)
        buffer = metadata.next_token_logits_buffer  # None outside of graphs
        if buffer is not None and not (args or kwargs) and self._is_product and is_dense(lm_head):
            logits = self._product(hidden_states, lm_head.weight, buffer)
            if logits is not None:
                return logits
        return self._of_rank._get_logits(hidden_states, lm_head, metadata, *args, **kwargs)

    @torch.no_grad()
    def _product(self, hidden: Tensor, weight: Tensor, buffer: Tensor) -> Tensor | None:
        """hidden [rows, hidden], weight [columns, hidden], buffer [rows, vocab] float32 -> logits [rows, columns].

        Returns None for another graph's buffer, for too many columns, and for a shard that the model gathers.
        """
        columns = len(weight)
        if buffer.shape != (len(hidden), self._vocab_size) or (columns < self._vocab_size and not self._gathers):
            return None
        logits = place(buffer, columns, weight.dtype)
        if logits is None:
            return None
        torch.mm(hidden.to(weight.dtype), weight.T, out=logits)
        if self._of_rank.logit_scale is not None:
            logits.mul_(self._of_rank.logit_scale)
        if not self._gathers:
            self.form = columns, weight.dtype
        return logits


def is_dense(lm_head: Any) -> bool:
    """Whether a head is a 16-bit weight, without a quantisation method or an adapter."""
    quantised = should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
    dtype = getattr(getattr(lm_head, "weight", None), "dtype", None)
    return dtype in _HALF and not quantised and unwrap_lora_layer(lm_head) is lm_head


def place(buffer: Tensor, columns: int, dtype: torch.dtype) -> Tensor | None:
    """buffer [rows, vocab] float32, the start of its storage -> a view [rows, columns] of the end of its memory.

    Rows at the end can be widened in place. Returns None where they do not fit.
    """
    cells, step = buffer.view(-1).view(dtype), _ALIGNMENT // dtype.itemsize
    count = len(buffer) * columns
    start = (cells.numel() - count) // step * step
    return None if start < 0 else cells[start : start + count].view(-1, columns)


def widen(placed: Tensor, vocab_size: int) -> Tensor:
    """The first rows of what `place` gave, [rows, columns] -> [rows, vocab] float32, at the start of that memory.

    `placed` is lost. A launch writes all rows that end before the first one that it reads, about half of the rows
    that are left. The last rows begin within their own result and are read from a copy.
    """
    rows, columns = placed.shape
    wide = placed.as_strided((rows, 2 * vocab_size), (2 * vocab_size, 1), 0).view(torch.float32)
    done = 0
    while done < rows:
        free = (placed.storage_offset() + done * columns) // (2 * vocab_size)  # rows before the first that is read
        end = min(free, rows) if free > done else rows
        source = placed[done:end, :vocab_size]
        _copy(source if free > done else source.clone(), wide[done:end])
        done = end
    return wide


def _copy(half: Tensor, wide: Tensor) -> None:
    if half.is_cuda:
        cast_to_float32_logits(half, wide)  # torch's is slower
    else:
        wide.copy_(half)
