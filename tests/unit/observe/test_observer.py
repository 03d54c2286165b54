"""What an observer tells in the log and in Prometheus, on ranks that log and on ranks that do not."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from dflash_sglang.observe import series
from dflash_sglang.observe.alarm import CHANCE, STATES, STAYS, WINDOW, Alarm
from dflash_sglang.observe.counts import Counts, DoneStep
from dflash_sglang.observe.observer import Observer
from dflash_sglang.startup.launch_checks import METRIC_LABELS, label_problems

BLOCK = 8
COPIES = {"proposed": 30, "beyond_block": 10, "accepted": 20, "mean_match": 9.5}


class Told:
    """An observer, and what it tells on a rank that logs if it speaks."""

    def __init__(self, caplog: pytest.LogCaptureFixture, *, speaks: bool = True, chooses: bool = False) -> None:
        caplog.set_level("INFO")
        self.caplog, self.registry = caplog, CollectorRegistry()
        collector = SimpleNamespace(
            labels={"model_name": "M"},
            _counter_cls=partial(Counter, registry=self.registry),
            _gauge_cls=partial(Gauge, registry=self.registry),
            spec_accept_rate=Gauge("sglang_rate", "SGLang's.", ["model_name"], registry=self.registry),
        )
        self.reporter = SimpleNamespace(
            is_stats_logging_rank=speaks, current_scheduler_metrics_enabled=True, metrics_collector=collector,
            stats=SimpleNamespace(),
        )  # fmt: skip
        causes: Any = SimpleNamespace(context_tokens=0, line=lambda raised, _: f"raised {raised.state}")
        told = [lambda: 1.5, lambda: COPIES] if chooses else []
        counts = Counts(4 * BLOCK, ragged=False, chooses=chooses)
        self.observer = Observer(counts, Alarm(BLOCK), causes, *told)

    def after(self, *steps: DoneStep) -> list[str]:
        """The lines of a report after these steps."""
        for step in steps:
            self.observer.verified(step, 100)
        self.caplog.clear()
        self.observer.report(self.reporter)
        return [record.message for record in self.caplog.records]

    def series(self) -> dict[tuple[str, ...], float]:
        """Values by name and own labels."""
        found = {}
        for sample in (one for metric in self.registry.collect() for one in metric.samples):
            if not sample.name.endswith("_created"):
                own = (of for label, of in sample.labels.items() if label in METRIC_LABELS)
                found[(sample.name.removeprefix("dflash_"), *own)] = sample.value
        return found


def step(width: int, accepted: int = 1, chain: int | None = None, requests: int = 1) -> DoneStep:
    return DoneStep(width, [accepted] * requests, np.full(requests, 4 * BLOCK), chain=chain)


@pytest.mark.parametrize("speaks", [False, True])
def test_a_rank_that_does_not_log_has_the_alarms_state_too(speaks, caplog):
    told = Told(caplog, speaks=speaks)
    lines = [line for _ in range(STAYS) for line in told.after(step(BLOCK, 0, requests=WINDOW))]
    assert told.observer.snapshot()["alarm"] == CHANCE
    assert [line for line in lines if not line.startswith("DFlash decode")] == [f"raised {CHANCE}"] * speaks
    assert len(lines) == (STAYS + 1) * speaks
    assert [told.series()["alarm", state] for state in STATES] == [1, 0]


def test_two_reports_tell_of_the_steps_between_them_and_of_none_where_there_were_none(caplog):
    """A rank without requests reports, too."""
    told = Told(caplog)
    assert told.after() == [] and not [name for name, *_ in told.series() if name != "sglang_rate"]
    (line,) = told.after(step(BLOCK), step(BLOCK))
    before = told.series()
    assert line == (
        "DFlash decode, #steps: 2, accept len: 2.00, accept rate: 0.14, "
        "by position: 1.00 0.00 0.00 0.00 0.00 0.00 0.00, rows per token: 4.00, width: 8x2"
    )
    assert told.after() == [] and told.series() == before
    (line,) = told.after(step(4), step(2))
    assert line == (
        "DFlash decode, #steps: 2, accept len: 2.00, accept rate: 0.50, by position: 1.00 0.00 0.00, "
        "rows per token: 1.50, width: 2x1 4x1"
    )
    (line,) = told.after(step(1, 0))
    assert line.endswith("accept rate: 0.00, by position: none verified, rows per token: 1.00, width: 1x1")
    after, names = told.series(), ("verified_rows_total", "committed_tokens_total")
    steps = {name[1:]: value for name, value in after.items() if name[0] == "steps_total"}
    assert steps == {
        ("8", "whole", "not_ragged"): 2, ("4", "whole", "not_ragged"): 1, ("2", "whole", "not_ragged"): 1,
        ("1", "plain", "set"): 1,
    }  # fmt: skip
    assert [(before[name,], after[name,]) for name in names] == [(16, 23), (4, 9)]


def test_a_server_has_the_series_of_what_it_does(caplog):
    """Of copies and of an estimate where there are some; of positions beyond the block once a copy is accepted."""
    shown: dict[bool, dict[tuple[str, ...], float]] = {}
    for chooses in (False, True):
        told = Told(caplog, chooses=chooses)
        told.after(step(BLOCK), step(1, 0), step(BLOCK, BLOCK - 1, chain=2 * BLOCK))
        found = shown[chooses] = told.series()
        assert found["accept_length",] == 1 + BLOCK / 3
        rate = BLOCK / (BLOCK - 1 + 2 * BLOCK - 1)
        assert told.reporter.stats.spec_accept_rate == found["sglang_rate",] == rate
        for more in (0, 2):
            of = [int(at) for name, at in (key for key in told.series() if key[0] == "accepted_proposals_total")]
            assert of == [*range(1, BLOCK + more)]
            told.after(step(BLOCK, BLOCK + 1, chain=2 * BLOCK))
    names = ("estimated_over_width_1", "copied_proposals_total", "accepted_copies_total")
    assert [shown[True].get((name,)) for name in names] == [1.5, 30, 20]
    assert [shown[False].get((name,)) for name in names] == [None] * 3
    of_all = {name.removesuffix("_total") for name, *_ in shown[True]}
    assert of_all == {*series.COUNTERS, *series.GAUGES, "sglang_rate"}


def test_labels_that_series_have_are_refused_as_extra_ones():
    own = {label for _, labels in (*series.COUNTERS.values(), *series.GAUGES.values()) for label in labels}
    assert own == METRIC_LABELS
    (problem,) = label_problems({"state": "a", "region": "b", "width": "c"})
    assert str(problem).startswith("--extra-metric-labels=['state', 'width']: expected other names than")
    assert not [*label_problems({"region": "b"}), *label_problems(None)]
