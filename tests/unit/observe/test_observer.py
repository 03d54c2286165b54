"""What an observer does on ranks that log and on ranks that do not, and with a pause of the server."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from dflash_sglang.observe import series
from dflash_sglang.observe.alarm import CHANCE, STAYS, WINDOW, Alarm
from dflash_sglang.observe.counts import Counts, DoneStep
from dflash_sglang.observe.observer import Observer
from dflash_sglang.observe.step_split import LONGEST_REST, StepSplit
from dflash_sglang.startup.launch_checks import METRIC_LABELS, label_problems

BLOCK = 8


class Clock:
    """Marks are seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start


def test_a_rank_that_does_not_log_has_the_alarms_state_too(caplog):
    causes: Any = SimpleNamespace(context_tokens=0, line=lambda raised, requests: f"raised {raised.state}")
    reporter = SimpleNamespace(is_stats_logging_rank=False, current_scheduler_metrics_enabled=False)
    for speaks in (False, True):
        reporter.is_stats_logging_rank = speaks
        counts = Counts(BLOCK, ragged=False, chooses=False)
        observer = Observer(counts, Alarm(BLOCK), causes, lambda: (1.0, 1.0), StepSplit(Clock()))
        for _ in range(STAYS):
            nothing = np.zeros(WINDOW, np.int64)
            observer.verified(DoneStep(BLOCK, nothing, np.full(WINDOW, BLOCK)), 100)
            observer.report(reporter)
        assert observer.snapshot()["alarm"] == CHANCE
    assert [record.message for record in caplog.records if "raised" in record.message] == [f"raised {CHANCE}"]


def positions(registry: CollectorRegistry) -> list[int]:
    """That have series, of verified and of accepted proposals."""
    names = ("dflash_verified_proposals_total", "dflash_accepted_proposals_total")
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return [int(one.labels["position"]) for name in names for one in samples if one.name == name]


def reporter_of(registry: CollectorRegistry, speaks: bool) -> Any:
    """SGLang's reporter of a rank whose series are in this registry, and that logs if it speaks."""
    collector = SimpleNamespace(
        labels={"model_name": "M"},
        _counter_cls=partial(Counter, registry=registry),
        _gauge_cls=partial(Gauge, registry=registry),
        spec_accept_rate=Gauge("sglang_rate", "SGLang's.", ["model_name"], registry=registry),
    )
    return SimpleNamespace(
        is_stats_logging_rank=speaks, current_scheduler_metrics_enabled=True, metrics_collector=collector,
        stats=SimpleNamespace(),
    )  # fmt: skip


@pytest.mark.parametrize("estimates", [None, (1.5, 2.0)])
def test_a_server_has_series_only_of_rates_that_it_estimates_and_of_copies_that_it_proposes(estimates):
    registry = CollectorRegistry()
    reporter = reporter_of(registry, speaks=False)
    causes: Any = SimpleNamespace(context_tokens=0)
    counts = Counts(4 * BLOCK, ragged=False, chooses=estimates is not None)
    bins = {"from": [0.9, 0.0], "verified": [5.0, 3.0], "expected": [4.8, 0.5], "accepted": [4.0, 1.0]}
    told = [None, None] if estimates is None else [lambda: estimates, lambda: bins]
    of_copies = {"proposed": 30, "beyond_block": 10, "accepted": 20, "mean_match": 9.5}
    copied = None if estimates is None else lambda: of_copies
    observer = Observer(counts, Alarm(BLOCK), causes, told[0], StepSplit(Clock()), told[1], copied)
    observer.verified(DoneStep(BLOCK, np.ones(1, np.int64), np.full(1, BLOCK)), 100)
    for accepted, rows in (
        (0, 1),
        (BLOCK - 1, 2 * BLOCK),
    ):  # a step that drafts nothing, and a copy beyond the block
        observer.verified(DoneStep(min(rows, BLOCK), [accepted], np.full(1, 4 * BLOCK), chain=rows), 100)
    observer.report(reporter)
    found = {sample.name: sample.value for metric in registry.collect() for sample in metric.samples}
    assert found["dflash_accept_length"] == 1 + BLOCK / 3 and "dflash_accept_length_after_warm_up" not in found
    assert found["dflash_drafting_accept_length"] == 1 + BLOCK / 2
    rate = BLOCK / (BLOCK - 1 + 2 * BLOCK - 1)
    assert reporter.stats.spec_accept_rate == found["sglang_rate"] == found["dflash_accept_rate"] == rate
    assert positions(registry) == [*range(1, BLOCK)] * 2
    observer.verified(DoneStep(BLOCK, [BLOCK + 1], np.full(1, 4 * BLOCK), chain=2 * BLOCK), 100)
    observer.report(reporter)
    assert positions(registry) == [*range(1, BLOCK + 2)] * 2
    observer.verified(DoneStep(1, [0], np.full(1, BLOCK)), 100)
    observer.report(reporter)
    found = {sample.name: sample.value for metric in registry.collect() for sample in metric.samples}
    assert (found["dflash_accept_length"], found["dflash_drafting_accept_length"]) == (1, BLOCK + 2)
    names = ("dflash_estimated_over_width_1", "dflash_estimated_over_block")
    assert tuple(found.get(name) for name in names) == (estimates or (None, None))
    names = ("copied_proposals", "copied_beyond_blocks", "accepted_copies")
    counted = tuple(found.get(f"dflash_{name}_total") for name in names)
    assert counted == ((None,) * 3 if estimates is None else (30, 10, 20))
    chances = {
        (sample.name.split("_")[2], sample.labels["at_least"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.startswith("dflash_chance") and sample.name.endswith("_total")
    }
    expected = {(name, str(least)): bins[name][at] for name in bins for at, least in enumerate(bins["from"])}
    assert chances == ({} if estimates is None else {key: of for key, of in expected.items() if key[0] != "from"})


def test_two_reports_tell_of_the_steps_between_them_and_of_none_where_there_were_none(caplog):
    """A rank without requests reports, too."""
    caplog.set_level("INFO")
    registry = CollectorRegistry()
    reporter = reporter_of(registry, speaks=True)
    causes: Any = SimpleNamespace(context_tokens=0)
    counts = Counts(BLOCK, ragged=False, chooses=False)
    observer = Observer(counts, Alarm(BLOCK), causes, None, StepSplit(Clock()))

    def told(*widths: int) -> list[str]:
        """The lines of a report after steps of one request of these widths, one proposal of each accepted."""
        for width in widths:
            observer.verified(DoneStep(width, np.ones(1, np.int64), np.full(1, width)), 100)
        caplog.clear()
        observer.report(reporter)
        return [record.message for record in caplog.records]

    def counted() -> dict[str, float]:
        samples = [sample for metric in registry.collect() for sample in metric.samples]
        return {one.name: sum(other.value for other in samples if other.name == one.name) for one in samples}

    assert told() == [] and counted() == {}
    (first,) = told(BLOCK, BLOCK)
    before = counted()
    assert f"#steps: 2, accept len: 2.00, accept rate: {2 / (2 * BLOCK - 2):.2f}" in first
    assert first.endswith(f"rows per token: {BLOCK / 2:.2f}, width: {BLOCK}x2")
    assert told() == [] and counted() == before
    (second,) = told(4)
    assert "#steps: 1, accept len: 2.00, accept rate: 0.33" in second
    assert second.endswith("rows per token: 2.00, width: 4x1")
    assert counted()["dflash_steps_total"] == before["dflash_steps_total"] + 1 == 3
    assert counted()["dflash_verified_rows_total"] == before["dflash_verified_rows_total"] + 4 == 2 * BLOCK + 4


def test_a_pause_between_two_steps_is_no_part_of_a_step():
    clock, rests = Clock(), (0.25, 2 * LONGEST_REST, 0.5)
    split = StepSplit(clock)
    for rest in (*rests, 0.0):
        split._left = 0  # this one is timed
        last, clock.now = clock.now, clock.now + rest
        split.begin(last)
        clock.now += 1.0
        split.drafted()
        clock.now += 2.0
        split.end(clock.mark())
    assert split.timed == 2
    assert split.seconds == {"draft": 2.0, "verify": 4.0, "rest": 0.75}


def test_labels_that_series_have_are_refused_as_extra_ones():
    own = {label for _, labels in (*series.COUNTERS.values(), *series.GAUGES.values()) for label in labels}
    assert own == METRIC_LABELS
    (problem,) = label_problems({"state": "a", "region": "b", "width": "c"})
    assert str(problem).startswith("--extra-metric-labels=['state', 'width']: expected other names than")
    assert not [*label_problems({"region": "b"}), *label_problems(None)]
