"""The support matrix in the docs, from the tests that show its cells: python -m tests.support_matrix [--check]

A test marked `matrix(target=..., draft=..., kv=..., outcome=...)` is the proof of a row: "works", "refused" or
"built-in worker". `--check` fails where the page says something else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from dflash_sglang.families import FOREIGN_ARCHITECTURES

PAGE = Path(__file__).parents[1] / "docs" / "support-matrix.md"
HEAD = """# Support matrix

Made by `python -m tests.support_matrix` from the tests that show each row. "works": output equals decoding \
without speculation, or the draft's numbers equal the reference's, as the test says; "refused": start-up ends \
with the message that the test shows. Tests marked (GPU) run with `pytest -m gpu`.

| target | draft | KV | outcome | shown by |
|---|---|---|---|---|
"""
FOREIGN_HEAD = """
## Drafts that the built-in worker serves

With one WARNING at start-up; an error with `DFLASH_SGLANG_REQUIRE=1`.

| architecture | why |
|---|---|
"""


class Rows:
    """A pytest plugin that collects the marked tests by row."""

    def __init__(self) -> None:
        self.tests: dict[tuple[str, str, str, str], set[str]] = defaultdict(set)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            gpu = " (GPU)" if item.get_closest_marker("gpu") else ""
            shown_by = f"`{item.location[0].removeprefix('tests/')}::{item.originalname}`{gpu}"
            for mark in item.iter_markers("matrix"):
                self.tests[_row(**mark.kwargs)].add(shown_by)


def _row(outcome: str, target: str = "any", draft: str = "any", kv: str = "any") -> tuple[str, str, str, str]:
    if outcome not in ("works", "refused", "built-in worker"):
        raise ValueError(f"matrix(outcome={outcome!r}): expected works, refused or built-in worker")
    return target, draft, kv, outcome


def page() -> str:
    rows = Rows()
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(["--collect-only", "-q", "tests"], plugins=[rows])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected: {status!r}")
    lines = [
        "| " + " | ".join([*row, ", ".join(sorted(tests))]) + " |" for row, tests in sorted(rows.tests.items())
    ]
    foreign = [f"| `{name}` | {why} |" for name, why in FOREIGN_ARCHITECTURES.items()]
    return HEAD + "\n".join(lines) + "\n" + FOREIGN_HEAD + "\n".join(foreign) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    now = page()
    if check:
        if PAGE.read_text() != now:
            print(f"{PAGE.name} is not what the tests say: run python -m tests.support_matrix")
            return 1
        return 0
    PAGE.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
