"""Prints the tests behind the support matrix, by row: python -m tests.support.support_matrix

A test marked `matrix(target=..., draft=..., kv=..., outcome=...)` is the proof of a row: "works", "built-in
worker" or "refused", with the beginning of its message where the mark has one.
"""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict

import pytest

OUTCOMES = ("works", "refused", "built-in worker")


class Rows:
    """A pytest plugin that collects the marked tests by row."""

    def __init__(self) -> None:
        self.tests: dict[tuple[str, ...], set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            gpu = " (GPU)" if item.get_closest_marker("gpu") else ""
            shown_by = f"{item.location[0].removeprefix('tests/')}::{item.originalname}{gpu}"
            for mark in item.iter_markers("matrix"):
                self.tests[row_of(**mark.kwargs)].add(shown_by)


def row_of(
    outcome: str, target: str = "any", draft: str = "any", kv: str = "any", message: str = ""
) -> tuple[str, ...]:
    if outcome not in OUTCOMES:
        raise ValueError(f"matrix(outcome={outcome!r}): expected one of {', '.join(OUTCOMES)}")
    return target, draft, kv, f"{outcome}: {message}" if message else outcome


def main() -> None:
    rows = Rows()
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(["--collect-only", "-q", "tests"], plugins=[rows])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected: {status!r}")
    for row, tests in sorted(rows.tests.items()):
        print(" | ".join(row), *(f"    {test}" for test in sorted(tests)), sep="\n")


if __name__ == "__main__":
    main()
