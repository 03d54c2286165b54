"""What a draft has beside a head: edges between the candidates of one position and of the next."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dflash_sglang.kernels.head.selector_walk import Codebooks


class Edges(Protocol):
    """Scores a candidate of one step by the token chosen in the step before (`kernels/head/selector_walk.py`).

    Steps are chosen one after the other. A draft without edges chooses each token by its row alone.
    """

    candidates: int  # of each step

    @property
    def codebooks(self) -> Codebooks:
        """Whole on every rank: candidates are tokens of the whole vocabulary."""

    def project(self, rows: Tensor) -> Tensor:
        """rows [N, hidden] -> [N, rank], what the edges to each step are scored with. Capturable in a CUDA
        graph."""
