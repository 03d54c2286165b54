"""Queries that FlashAttention reads where the QKV projection left them.

SGLang's backend copies each layer's queries, a slice of the projection's rows, into a tensor of their own first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StridedQueries(Tensor):
    """A slice of rows whose `contiguous` is itself; whatever else is done with it gives ordinary tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:
        del args, kwargs
        return self.as_subclass(Tensor)


def read_by_strides(backend: Any) -> None:
    """backend: one whose kernel takes queries [rows, heads, head_dim] with any stride between rows."""
    forward = backend.forward_extend

    def forward_extend(
        q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        if forward_batch.forward_mode.is_target_verify() and q.stride(-1) == 1:
            q = q.as_subclass(StridedQueries)
        return forward(q, k, v, layer, forward_batch, *args, **kwargs)

    backend.forward_extend = forward_extend
