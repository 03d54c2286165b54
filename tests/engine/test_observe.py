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
from dflash_sglang.observe.series import COUNTERS, GAUGES
from tests.support.another_target import another_target
from tests.support.engines import accepted_proposals, greedy_params, serve
from training.pair import held_out_prompts, pair_directories

pytestmark = [pytest.mark.slow, pytest.mark.full]

TARGET, DRAFT = (Path(pair_directories()[name]) for name in ("target", "draft"))
PROMPTS = [list(text.encode()) for text in held_out_prompts() if len(text) > 150][:16]
NEW_TOKENS = 100
CHOOSING = "dflash_estimated_over_width_1"  # of a server that chooses widths


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
    names = ("request_steps", "verified_rows", "drafted_proposals")
    assert [told[name] for name in names] == [steps, 16 * steps, 15 * steps]
    assert told["accept_rate"] == sum(told["accepted"]) / (15 * steps)
    assert told["shapes"] == {"whole": {"not_ragged": told["steps"]}}
    assert told["alarm"] == "none"

    series = scraped(server)
    own = ("position", "width", "form", "reason", "state")
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
    (line, *_) = re.findall(r"DFlash decode.* accept rate: ([\d.]+)", server.log_text())[-1:]
    rate = re.search(
        r'^sglang:spec_accept_rate\{[^}]*tp_rank="0"[^}]*\} ([\d.e-]+)$', server.text("/metrics"), re.M
    )
    assert rate and float(rate[1]) == pytest.approx(float(line), abs=0.005)
    assert {sample.labels["tp_rank"] for sample in series["dflash_accept_length"]} == {"0"}

    lines = re.findall(r"DFlash decode, #steps: 1, accept len: ([\d.]+)", server.log_text())
    assert len(lines) == told["steps"] == server.log_text().count("Decode batch")
    assert any(float(line) > 2 for line in lines)


def test_every_series_is_exported_in_both_formats(server):
    """Prometheus 2 asks for the second. The docs have all, see `tests/unit/test_operating.py`."""
    decode(server)
    told = {f"dflash_{name}_total" for name in COUNTERS} | {f"dflash_{name}" for name in GAUGES}
    for accept in ("text/plain", "application/openmetrics-text;version=1.0.0"):
        found = {name for name in scraped(server, accept) if not name.endswith("_created")}
        assert found == told - {CHOOSING}, accept


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
    assert "(1) weights of the target were updated" in line and "target_layer_ids=[0, 2, 4] of 5" in line
    alarm = {sample.labels["state"]: sample.value for sample in scraped(server)["dflash_alarm"]}
    assert alarm == {"chance_level": 0, "fell": 1}
