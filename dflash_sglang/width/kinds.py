"""Kinds: which rows a step may verify of its requests, verify budgets aside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dflash_sglang.settings.width import PLAIN


class Kind(NamedTuple):
    """A chain of `width` rows for each request; or, `ragged`, the likeliest rows of such chains; or a tree of
    `nodes` for each request, grown over a block of `width`; or a chain of `chain` rows, a block and more of its
    copy."""

    width: int
    ragged: bool = False
    nodes: int | None = None
    chain: int | None = None

    def __str__(self) -> str:
        if self.chain:
            return f"copy {self.chain}"
        return f"tree {self.nodes}" if self.nodes else f"{'ragged ' * self.ragged}{self.width}"


def kinds_of(widths: Sequence[int], ragged: bool, trees: Iterable[int]) -> list[Kind]:
    """All that steps may have: the chains of these widths first, ascending as these are."""
    of_parts = [Kind(width, ragged=True) for width in widths if ragged and width > PLAIN]
    return [*map(Kind, widths), *of_parts, *(Kind(widths[-1], nodes=nodes) for nodes in sorted(trees))]
