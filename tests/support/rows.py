"""Rows of a matrix that `make test` runs, and those that it leaves to `make test-full`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def in_full_but(rows: Iterable[str], *core: str) -> list[ParameterSet]:
    """Parameters of a fixture or a test: each row by its name, all but `core` marked `full`.

    Raises ValueError for a core row that is none of the rows.
    """
    names = list(rows)
    if unknown := set(core) - set(names):
        raise ValueError(f"core={sorted(unknown)}: expected some of {names}")
    return [pytest.param(name, id=name, marks=() if name in core else pytest.mark.full) for name in names]
