"""The Prometheus series `dflash_...`, beside SGLang's own and with its labels (docs/reference/metrics.md)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from dflash_sglang.observe.alarm import STATES, Alarm
from dflash_sglang.observe.counts import Shape, Totals

COUNTERS: dict[str, tuple[str, Sequence[str]]] = {
    "steps": ("Decode steps.", ("width", "form", "reason")),
    "request_steps": ("Requests of all decode steps.", ()),
    "drafted_proposals": ("Proposals drafted.", ()),
    "verified_rows": ("Rows verified, each request's first among them.", ()),
    "committed_tokens": ("Tokens committed.", ()),
    "verified_proposals": ("Proposals verified, by position.", ("position",)),
    "accepted_proposals": ("Proposals accepted, by position.", ("position",)),
    "copied_proposals": ("Proposals copied from the text of their request.", ()),
    "accepted_copies": ("Copied proposals accepted.", ()),
}
GAUGES: dict[str, tuple[str, Sequence[str]]] = {
    "accept_length": ("Committed tokens of a request-step, since the last decode line.", ()),
    "estimated_over_width_1": ("Estimated tokens per second over those of steps of width 1, by step times.", ()),
    "alarm": ("1 while acceptance is as bad as the state says.", ("state",)),
}


class Series:
    """Made once per scheduler, after SGLang's. `update` sets what is scraped; nothing runs between two updates."""

    def __init__(self, collector: Any) -> None:
        """collector: SGLang's SchedulerMetricsCollector, whose labels and metric classes are taken."""
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR, which prometheus_client reads as it is imported.
        from prometheus_client import Counter, Gauge

        self._labels: dict[str, Any] = collector.labels
        self._rate_of_sglang = collector.spec_accept_rate  # where SGLang counts a whole block of every step
        gauge = functools.partial(collector._gauge_cls or Gauge, multiprocess_mode="mostrecent")
        self._metrics = {
            name: made(name=f"dflash_{name}", documentation=text, labelnames=[*self._labels, *own])
            for made, series in ((collector._counter_cls or Counter, COUNTERS), (gauge, GAUGES))
            for name, (text, own) in series.items()
        }
        self._counted: dict[tuple[str, tuple[Any, ...]], float] = {}
        self._of = functools.cache(self._with_labels)

    def update(
        self,
        totals: Totals,
        latest: Totals,
        shapes: Mapping[Shape, int],
        alarm: Alarm,
        over_width_1: float | None,
        copies: Mapping[str, float] | None,
    ) -> None:
        """totals, shapes, copies: since start-up. latest: since the last update. over_width_1, copies: as in
        `Observer`."""
        for shape, steps in shapes.items():
            self._count("steps", steps, *shape)
        self._count("request_steps", totals.requests)
        self._count("drafted_proposals", totals.drafted)
        self._count("verified_rows", totals.rows)
        self._count("committed_tokens", totals.committed)
        by_position = zip(totals.verified.tolist(), totals.accepted.tolist(), strict=True)
        for position, (verified, accepted) in enumerate(by_position, start=1):
            if position < alarm.block or accepted:  # beyond it only copies have positions
                self._count("verified_proposals", verified, position)
                self._count("accepted_proposals", accepted, position)
        if copies is not None:
            self._count("copied_proposals", copies["proposed"])
            self._count("accepted_copies", copies["accepted"])
        self._rate_of_sglang.labels(**self._labels).set(latest.accept_rate)
        self._of("accept_length").set(latest.accept_length)
        if over_width_1 is not None:
            self._of("estimated_over_width_1").set(over_width_1)
        for state in STATES:
            self._of("alarm", state).set(float(state == alarm.state))

    def _count(self, name: str, value: float, *own: Any) -> None:
        """Raise a counter to its value since start-up."""
        before = self._counted.get((name, own), 0)
        self._of(name, *own).inc(value - before)
        self._counted[name, own] = value

    def _with_labels(self, name: str, *own: Any) -> Any:
        metric, (_, names) = self._metrics[name], (COUNTERS | GAUGES)[name]
        return metric.labels(**self._labels, **dict(zip(names, own, strict=True)))
