"""Copies of a head's rows for drafting alone, which reads fewer bytes: frequent tokens, or all of them in fp8."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dflash_sglang.checkpoint.token_map import FLAG
from dflash_sglang.kernels.head.fp8_linear import FP8, fp8_linear, quantise_rows
from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.startup.facts import LoadError

_GRANULE = 16  # rows that the fp8 GEMM takes at once
_ROWS_AT_A_TIME = 4096  # quantised at once: in float32 they take memory


class HotRows:
    """Some rows of a dense head, as `TargetHead` takes a head: row i is that of token_ids[i].

    Sharded as the head is: a rank has the rows of its own shard's tokens, in a copy that `refresh` brings up to
    date. Verification makes the output the target's whatever is proposed.
    """

    def __init__(self, lm_head: nn.Module, token_ids: Tensor) -> None:
        """token_ids [n] int64, ascending. Raises ValueError for a quantised head."""
        self._lm_head = lm_head
        self._rows, self.shard_indices = kept_rows(lm_head, token_ids)
        self.weight: Tensor = lm_head.weight.index_select(0, self._rows)
        self.tp_group = getattr(lm_head, "tp_group", None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes the head's present weights over, into the memory that the graphs know."""
        torch.index_select(self._lm_head.weight, 0, self._rows, out=self.weight)


def kept_rows(lm_head: nn.Module, token_ids: Tensor | None) -> tuple[Tensor, SimpleNamespace]:
    """The rows of this rank's shard that hold some of `token_ids` [n] int64, ascending, None for all tokens
    -> [kept] int64, and the shard_indices of a head that has these alone.

    Raises ValueError for token_ids of a quantised head.
    """
    head = TargetHead(lm_head)
    if token_ids is None:
        first, last = head.first_id, head.first_id + head.rows
        rows = torch.arange(head.rows)
    elif head.quantised:
        raise LoadError(
            f"{FLAG}: expected a target whose LM head is not quantised, found "
            f"{type(getattr(lm_head, 'quant_method', None)).__name__}. Remove {FLAG}."
        )
    else:
        bounds = torch.tensor([head.first_id, head.first_id + head.rows])
        first, last = torch.searchsorted(token_ids, bounds).tolist()
        rows = token_ids[first:last] - head.first_id
    shard = SimpleNamespace(org_vocab_start_index=first, num_org_elements=last - first)
    return rows.to(lm_head.weight.device), shard


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
