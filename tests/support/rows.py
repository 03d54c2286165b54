"""Rows of a matrix that `make test` runs, and those that it leaves to `make test-full` and `make test-release`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest
from _pytest.mark import ParameterSet


def in_full_but(rows: Iterable[str], *core: str, release: Collection[str] = ()) -> list[ParameterSet]:
    """Parameters of a fixture or a test: each row by its name, `release` marked so, all others but `core` `full`.

    Raises ValueError for a row of these that is none of the rows.
    """
    names = list(rows)
    if unknown := {*core, *release} - set(names):
        raise ValueError(f"rows={sorted(unknown)}: expected some of {names}")
    marks = {name: () for name in core} | {name: (pytest.mark.release,) for name in release}
    return [pytest.param(name, id=name, marks=marks.get(name, (pytest.mark.full,))) for name in names]
