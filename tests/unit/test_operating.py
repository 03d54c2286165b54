"""The operator's files: each alert has its section, the dashboard is whole, and every series exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from dflash_sglang.observe import series

DOCS = Path(__file__).parents[2] / "docs"
FILES = DOCS / "operating"
PAGE = (DOCS / "guide" / "operating.md").read_text()
DASHBOARD = json.loads((FILES / "grafana.json").read_text())
RULES = [rule for group in yaml.safe_load((FILES / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
PANEL_QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
SHOWN = re.findall(r"^```\n(.*)\n```$", PAGE, re.MULTILINE)
QUERIES = [*PANEL_QUERIES, *(rule["expr"] for rule in RULES), *SHOWN]


def test_each_alert_has_a_section_of_the_page_that_names_it() -> None:
    assert len(RULES) == 3
    for rule in RULES:
        page, _, section = rule["annotations"]["description"].partition(": ")
        assert page == "docs/guide/operating.md" and f"\n## {section}\n\n`{rule['alert']}`: " in PAGE
    scrape = yaml.safe_load((FILES / "prometheus.yml").read_text())
    assert all((FILES / name).is_file() for name in scrape["rule_files"]) and scrape["scrape_configs"]


def test_the_panels_of_the_dashboard_follow_its_variables() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}" and panel["description"]
        assert all('instance=~"$instance"' in target["expr"] for target in panel["targets"])


def test_every_series_of_a_query_is_one_that_a_server_has_and_the_docs_table_has_all() -> None:
    served = {f"dflash_{name}_total" for name in series.COUNTERS} | {f"dflash_{name}" for name in series.GAUGES}
    asked = {query: set(re.findall(r"dflash_\w+", query)) - served for query in QUERIES}
    assert QUERIES and not {query: unknown for query, unknown in asked.items() if unknown}
    metrics = (DOCS / "reference" / "metrics.md").read_text()
    assert set(re.findall(r"^\| `(dflash_\w+)` \| (?:`|\|)", metrics, re.MULTILINE)) == served
