"""What `bench/results` claims and misses is told in the docs."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results" / "missed-goals.md"
OTHERS = {"bench.json", "config.json", "grafana.json"}  # that documents name
Missed = tuple[str, str, str]  # file, value, bound


def claimed() -> list[Missed]:
    return [
        (path.name, str(claim["value"]), claim["bound"])
        for path in RESULTS.glob("*.json")
        for claim in json.loads(path.read_text())["claims"]
        if not claim["ok"]
    ]


def told() -> list[Missed]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    return [(row[0].strip("`"), row[2], row[3]) for row in rows if len(row) == 5 and row[0].endswith(".json`")]


def test_the_page_of_missed_goals_has_each_claim_that_does_not_hold_and_no_other() -> None:
    assert claimed()
    assert sorted(told()) == sorted(claimed())


def test_every_missed_goal_has_a_reason() -> None:
    for line in PAGE.read_text().splitlines():
        if re.match(r"\| `\w+\.json`", line):
            assert len(line.strip("|").split("|")[-1].split()) >= 2, line


def test_every_claim_is_judged_by_its_bound() -> None:
    for path in RESULTS.glob("*.json"):
        for claim in json.loads(path.read_text())["claims"]:
            found = re.fullmatch(r"(<=|>=) (-?[\d.]+)", claim["bound"])
            if found:
                holds = (
                    claim["value"] <= float(found[2]) if found[1] == "<=" else claim["value"] >= float(found[2])
                )
                assert claim["ok"] == holds, (path.name, claim)


def named() -> list[tuple[str, str]]:
    """(page, name of a result). A star stands for several files, NAME for one of the reader's."""
    names = re.compile(r"bench/results/([\w*]+\.json)|`([\w*]+\.json)`")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    found = [(page.name, one[1] or one[2]) for page in pages for one in names.finditer(page.read_text())]
    return [(page, name) for page, name in found if "NAME" not in name and name != "*.json"]


def test_every_result_that_a_document_names_is_there() -> None:
    for page, name in named():
        if name not in OTHERS:
            assert list(RESULTS.glob(name)), (page, name)


def test_every_result_is_named_by_a_document() -> None:
    quoted = {path.name for _, name in named() for path in RESULTS.glob(name)}
    assert sorted({path.name for path in RESULTS.iterdir()} - quoted) == []
