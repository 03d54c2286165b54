"""The table of the acceptance alarm, and what its run claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.alarm import claims, table

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_of_the_run() -> None:
    cases = json.loads((ROOT / "bench" / "results" / "alarm.json").read_text())["cases"]
    page = (ROOT / "docs" / "results" / "alarm.md").read_text().splitlines()
    assert [
        line for line in page if line.startswith(("| trained", *(f"| {one['pair']} " for one in cases)))
    ] == table(cases)


def test_a_run_claims_silence_on_the_trained_pair_and_one_line_on_each_broken_one() -> None:
    def holds(pair: str, alarm: str, lines: int) -> bool:
        case: dict[str, Any] = {"pair": pair, "text": "own text", "alarm": alarm, "lines": lines}
        return claims([case])[0]["ok"]

    assert holds("trained", "none", 0) and holds("wrong mask token", "chance_level", 1)
    assert holds("target updated, draft stale", "fell", 1)
    assert not holds("trained", "fell", 1) and not holds("wrong mask token", "none", 0)
    assert not holds("wrong mask token", "chance_level", 2)
