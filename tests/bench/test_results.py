"""What `bench/results` claims and misses is told in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
OTHERS = {"bench.json", "config.json", "grafana.json", "training.json"}  # that documents name
GOAL = re.compile(r"\b([\d.]+) \(goal ([\d.]+)\)")


def claims(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["claims"]


def tells(figure: str, goal: str, claim: dict[str, Any]) -> bool:
    """Whether `figure (goal GOAL)` is this claim's value, rounded, and bound."""
    rounding = 0.51 * 10 ** -len(figure.partition(".")[2])
    return abs(claim["value"] - float(figure)) < rounding and float(claim["bound"][3:]) == float(goal)


def test_every_claim_that_does_not_hold_has_its_goal_beside_it_on_a_page_that_names_the_file() -> None:
    told = {page: GOAL.findall(page.read_text()) for page in PAGES}
    missed = {path.name: [claim for claim in claims(path) if not claim["ok"]] for path in RESULTS.glob("*.json")}
    assert sum(map(len, missed.values())) == sum(map(len, told.values())) > 0
    named_by = {name: [page for page in PAGES if f"`{name}`" in page.read_text()] for name in missed}
    for name, of in missed.items():
        for claim in of:
            marks = [mark for page in named_by[name] for mark in told[page]]
            assert any(tells(*mark, claim) for mark in marks), (name, claim)
    for page, marks in told.items():
        near = [claim for name, of in missed.items() if page in named_by[name] for claim in of]
        for mark in marks:
            assert any(tells(*mark, claim) for claim in near), (page.name, mark)


def named() -> list[tuple[str, str]]:
    """(page, name of a result). A star stands for several files, NAME for one of the reader's."""
    names = re.compile(r"bench/results/([\w*]+\.json)|`([\w*]+\.json)`")
    found = [(page.name, one[1] or one[2]) for page in PAGES for one in names.finditer(page.read_text())]
    return [(page, name) for page, name in found if "NAME" not in name and name != "*.json"]


def test_a_document_names_every_result_and_no_other() -> None:
    for page, name in named():
        assert name in OTHERS or list(RESULTS.glob(name)), (page, name)
    quoted = {path.name for _, name in named() for path in RESULTS.glob(name)}
    assert sorted({path.name for path in RESULTS.iterdir()} - quoted) == []
