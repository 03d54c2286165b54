"""A dense head in fp8, for drafting alone: it reads half of the bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_sglang.kernels.head.fp8_linear import FP8, fp8_linear, quantise_rows
from dflash_sglang.models.head.hot_rows import kept_rows

_GRANULE = 16  # rows that the GEMM takes at once
_ROWS_AT_A_TIME = 4096  # quantised at once: in float32 they take memory


class Fp8Head:
    """`HotRows` in float8_e4m3fn with a scale each, as `TargetHead` takes a quantised head.

    Rows of zeros fill up the last granule.
    """

    def __init__(self, lm_head: nn.Module, token_ids: Tensor | None = None) -> None:
        """lm_head: dense, as for `TargetHead`. token_ids [n] int64, ascending: row i is that of token_ids[i], None
        for the rows of all tokens."""
        self._lm_head: Any = lm_head
        self._rows, self.shard_indices = kept_rows(lm_head, token_ids)
        self.tp_group = getattr(lm_head, "tp_group", None)
        self.quant_method = Fp8HeadMethod()
        granules = max(1, -(-len(self._rows) // _GRANULE))
        device, hidden = self._lm_head.weight.device, self._lm_head.weight.shape[1]
        self.weight = torch.zeros((granules * _GRANULE, hidden), dtype=FP8, device=device)
        self.weight_scale = torch.ones((len(self.weight), 1), dtype=torch.float32, device=device)
        self.refresh()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight, self.weight_scale)

    @torch.no_grad()
    def refresh(self) -> None:
        """As that of `HotRows`."""
        for start in range(0, len(self._rows), _ROWS_AT_A_TIME):
            rows = self._rows[start : start + _ROWS_AT_A_TIME]
            part = slice(start, start + len(rows))
            self.weight[part], self.weight_scale[part] = quantise_rows(self._lm_head.weight[rows])


class Fp8HeadMethod:
    """What stands for SGLang's quantisation method of an `Fp8Head`."""

    def apply(self, layer: Fp8Head, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [N, hidden] -> logits [N, rows of the copy]. A head has no bias."""
        return fp8_linear(x, layer.weight, layer.weight_scale)
