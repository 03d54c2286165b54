"""A target's head cut down to its frequent tokens, for drafting alone: it reads a fraction of the bytes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from dflash_sglang.checkpoint.token_map import FLAG
from dflash_sglang.models.head.target_head import TargetHead
from dflash_sglang.startup.facts import LoadError


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
