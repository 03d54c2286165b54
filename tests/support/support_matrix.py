"""The tests behind the support matrix, as a page of the docs: python -m tests.support.support_matrix [--check]

A test marked `matrix(target=..., draft=..., kv=..., outcome=...)` is the proof of a row: "works", "refused" or
"built-in worker". `--check` fails where the page says something else.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from dflash_sglang.checkpoint.families import FOREIGN_ARCHITECTURES
from tests.support.pages import written

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support-tests.md"
HEAD = """# Tests behind the support matrix

Made by `python -m tests.support.support_matrix` from the tests that show each row. "works": output equals \
decoding without speculation, or the draft's numbers equal the reference's, as the test says; "refused": start-up \
ends with a message (below). Tests marked (GPU) run with `pytest -m gpu`.

| target | draft | KV | outcome | shown by |
|---|---|---|---|---|
"""
REFUSALS_HEAD = """
## What refusals say

The beginning of each message, or its parts, as the tests look for them.

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
        self.messages: dict[str, list[str]] = defaultdict(list)  # of refusals, by the draft

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            gpu = " (GPU)" if item.get_closest_marker("gpu") else ""
            shown_by = f"`{item.location[0].removeprefix('tests/')}::{item.originalname}`{gpu}"
            for mark in item.iter_markers("matrix"):
                said = {name: value for name, value in mark.kwargs.items() if name != "message"}
                self.tests[row := _row(**said)].add(shown_by)
                if row[3] == "refused":
                    self._note(row, mark.kwargs.get("message") or _message(item))

    def _note(self, row: tuple[str, str, str, str], message: str | None) -> None:
        subject = ", ".join(part for part in row[:3] if part not in ("any", "model dtype", "z-lab", "Qwen3"))
        if message is not None and message not in self.messages[subject or row[1]]:
            self.messages[subject or row[1]].append(message)


def _row(outcome: str, target: str = "any", draft: str = "any", kv: str = "any") -> tuple[str, str, str, str]:
    if outcome not in ("works", "refused", "built-in worker"):
        raise ValueError(f"matrix(outcome={outcome!r}): expected works, refused or built-in worker")
    return target, draft, kv, outcome


def _message(item: pytest.Item) -> str | None:
    """What a test of several refusals expects to read, from the parameter that holds it."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    expected = parameters.get("expected")
    if isinstance(expected, list):
        return " ... ".join(expected)
    if isinstance(expected, str):
        return f"{parameters['field']}={parameters['value']!r}: expected {expected}"
    texts = (parameters.get(name) for name in ("message", "says", "field"))
    return next((text for text in texts if isinstance(text, str) and "=" in text), None)


def page() -> str:
    rows = Rows()
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(["--collect-only", "-q", "tests"], plugins=[rows])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected: {status!r}")
    lines = [
        "| " + " | ".join([*row, ", ".join(sorted(tests))]) + " |" for row, tests in sorted(rows.tests.items())
    ]
    refusals = [
        f"- {subject}: " + "; ".join(f"`{message}`" for message in messages)
        for subject, messages in sorted(rows.messages.items())
    ]
    foreign = [f"| `{name}` | {why} |" for name, why in FOREIGN_ARCHITECTURES.items()]
    return (
        HEAD
        + "\n".join(lines)
        + "\n"
        + REFUSALS_HEAD
        + "\n".join(refusals)
        + "\n"
        + FOREIGN_HEAD
        + "\n".join(foreign)
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(written(PAGE, page(), "tests.support.support_matrix"))
