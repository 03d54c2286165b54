"""LastRows: the context row of each request's last committed token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Context(NamedTuple):
    """Context rows, one of each request."""

    rows: Tensor  # [bs, hidden]
    known: Tensor  # [bs] bool; rows of others mean nothing


class LastRows:
    """Keeps what `fc` and `hidden_norm` make of the target's features, of each request's last positions.

    A step writes every row that it verifies, accepted or not, and the step after it knows which one was the last
    committed: a row is at its position modulo `size`, the rows of the widest block. Requests that come from
    another server have no rows before their first step. Methods are capturable in a CUDA graph.
    """

    def __init__(self, requests: int, size: int, hidden_size: int, dtype: torch.dtype, device: Any) -> None:
        """requests: rows of req_to_token, or more."""
        self.size = size
        self._rows = torch.zeros((requests, size, hidden_size), dtype=dtype, device=device)
        self._positions = torch.full((requests, size), -1, dtype=torch.int64, device=device)

    def write(self, rows: Tensor, positions: Tensor, requests: Tensor) -> None:
        """rows [T, hidden]; positions, requests [T] int64."""
        at = requests, positions % self.size
        self._rows[at], self._positions[at] = rows, positions

    def at(self, requests: Tensor, positions: Tensor) -> Context:
        """Of one position of each request; requests, positions [bs] int64."""
        at = requests, positions % self.size
        return Context(self._rows[at], self._positions[at] == positions)


def requests_of_rows(requests: Tensor, number: int, starts: Tensor | None) -> Tensor:
    """The request of each of `number` rows [number], of requests [bs]. starts [bs + 1] int32: first row of each,
    None where all have as many. Capturable in a CUDA graph."""
    if starts is None:
        return requests.repeat_interleave(number // max(len(requests), 1), output_size=number)
    rows = torch.arange(number, dtype=starts.dtype, device=starts.device)
    # Rows behind those of all requests are nobody's. A graph is captured with such.
    return requests[torch.searchsorted(starts[1:], rows, right=True).clamp(max=len(requests) - 1)]
