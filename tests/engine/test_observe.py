"""What operators see of a running server: /server_info, Prometheus series, the decode line, the alarm."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_sglang.demo.server import Server
from dflash_sglang.observe.alarm import STAYS, WINDOW
from dflash_sglang.observe.step_split import EVERY
from dflash_sglang.pair import held_out_prompts, pair_directories
from tests.support.another_target import another_target
from tests.support.engines import accepted_proposals, greedy_params, serve

# Of a server that chooses.
CHOOSING = {"dflash_estimated_over_width_1", "dflash_estimated_over_block"} | {
    f"dflash_chance_{kind}_total" for kind in ("verified", "expected", "accepted")
}
pytestmark = [pytest.mark.slow, pytest.mark.full]

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
PROMPTS = [list(text.encode()) for text in held_out_prompts() if len(text) > 150][:16]
NEW_TOKENS = 100
RATES = ("sglang:spec_accept_rate", "dflash_accept_rate")  # the same


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Every step is reported. A synchronous server runs no step whose results nobody gets."""
    flags = dict(
        enable_metrics=True, decode_log_interval=1, disable_overlap_schedule=True, max_running_requests=16
    )
    with serve(TARGET, DRAFT, **flags) as one:
        yield one


def acceptance(server: Server) -> dict[str, Any]:
    (state,) = server.get("/server_info")["internal_states"]
    return state["dflash_acceptance"]


def drafted_steps(server: Server) -> int:
    """Request-steps whose proposals were not copied."""
    (state,) = server.get("/server_info")["internal_states"]
    return state["dflash_acceptance"]["request_steps"] - state["dflash_copy"]["request_steps"]


def decode(server: Server) -> list[dict[str, Any]]:
    return server.generate(input_ids=PROMPTS, sampling_params=greedy_params(NEW_TOKENS))


def scraped(server: Server, accept: str = "text/plain") -> dict[str, list[Any]]:
    """Samples of this package by name, as a scraper gets them that accepts this type."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("dflash_")]
    return {name: [one for one in samples if one.name == name] for name in {one.name for one in samples}}


def test_counts_are_those_of_the_answers_in_server_info_prometheus_and_the_log(server):
    answers = decode(server)
    told = acceptance(server)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    accepted = accepted_proposals(answers)
    assert accepted.total() == steps > 100
    assert sum(answer["meta_info"]["spec_num_proposed_drafts"] for answer in answers) == 15 * steps
    assert told["verified"] == [steps] * 15
    assert told["accepted"] == [
        sum(count for proposals, count in accepted.items() if proposals >= position) for position in range(1, 16)
    ]
    assert (told["request_steps"], told["verified_rows"], told["drafted_proposals"]) == (
        steps,
        16 * steps,
        15 * steps,
    )
    assert told["accept_rate"] == sum(told["accepted"]) / (15 * steps)
    assert told["shapes"] == {"whole": {"not_ragged": told["steps"]}}
    assert told["alarm"] == "none"

    series = scraped(server)
    own = ("position", "width", "form", "reason", "part", "state")
    values = {
        (name, *(sample.labels[label] for label in own if label in sample.labels)): sample.value
        for name, samples in series.items()
        for sample in samples
    }
    for name in ("request_steps", "drafted_proposals", "verified_rows", "committed_tokens"):
        assert values[f"dflash_{name}_total",] == told[name]
    for name in ("verified", "accepted"):
        by_position = [values[f"dflash_{name}_proposals_total", str(at)] for at in range(1, 16)]
        assert by_position == told[name]
    assert values["dflash_steps_total", "16", "whole", "not_ragged"] == told["steps"]
    assert values["dflash_alarm", "fell"] == 0
    sglang = re.search(r"sglang:spec_accept_length\{([^}]*)\}", server.text("/metrics"))
    rates = [
        re.search(rf"^{name}\{{[^}}]*\}} ([\d.e-]+)$", server.text("/metrics"), re.MULTILINE) for name in RATES
    ]
    assert len({rate and float(rate[1]) for rate in rates} - {None}) == 1
    assert sglang and {sample.labels["tp_rank"] for sample in series["dflash_accept_length"]} == {"0"}
    assert 'tp_rank="0"' in sglang[1]

    lines = re.findall(r"DFlash decode, #steps: 1, accept len: ([\d.]+)", server.log_text())
    assert len(lines) == told["steps"] == server.log_text().count("Decode batch")
    assert any(float(line) > 2 for line in lines)


def test_a_timed_step_is_split_into_parts_that_make_it_up(server):
    while acceptance(server)["steps"] < 2 * EVERY:
        decode(server)
    split = acceptance(server)["step_split"]
    assert split["timed_steps"] >= 1
    parts = split["seconds"]
    assert 0 < parts["rest"] and 0 < parts["draft"] and 0 < parts["verify"]
    (state,) = server.get("/server_info")["internal_states"]
    (seconds,), (steps,) = (state["dflash_width"][name].values() for name in ("seconds", "steps"))
    mean = sum(parts.values()) / split["timed_steps"]
    assert 0.1 * seconds / steps < mean < 10 * seconds / steps


def test_every_series_is_in_the_docs_table_and_no_other(server):
    """But for what a server with one width does not learn."""
    told = set(re.findall(r"^\| `(dflash_\w+)` \|", PAGE.read_text(), re.MULTILINE))
    for accept in ("text/plain", "application/openmetrics-text;version=1.0.0"):  # Prometheus 2 asks for the second
        found = {name for name in scraped(server, accept) if not name.endswith("_created")}
        assert found == told - CHOOSING, accept


def test_the_alarm_speaks_once_when_the_target_is_updated_and_the_draft_is_not(server, tmp_path):
    while drafted_steps(server) < WINDOW:  # it works, after warm-up
        decode(server)
    assert "acceptance alarm" not in server.log_text()
    server.post("/flush_cache?timeout=60")
    server.post("/update_weights_from_disk", model_path=str(another_target(TARGET, tmp_path / "updated")))
    enough = drafted_steps(server) + (STAYS + 1) * WINDOW
    while drafted_steps(server) < enough:
        decode(server)
    assert acceptance(server)["alarm"] == "fell"
    (line,) = [line for line in server.log_text().splitlines() if "acceptance alarm" in line]
    assert "(1) weights of the target were updated" in line and "target_layers=[0, 2, 4] of 5" in line
    alarm = {sample.labels["state"]: sample.value for sample in scraped(server)["dflash_alarm"]}
    assert alarm == {"chance_level": 0, "fell": 1, "break_even": 0}
