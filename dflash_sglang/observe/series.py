"""The Prometheus series `dflash_...`, beside SGLang's own and with its labels (docs/reference/metrics.md)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_sglang.observe.alarm import STATES, Alarm
from dflash_sglang.observe.counts import Shape, Totals

if TYPE_CHECKING:
    from dflash_sglang.observe.step_split import StepSplit

COUNTERS: dict[str, tuple[str, Sequence[str]]] = {
    "steps": ("Decode steps.", ("width", "form", "reason")),
    "request_steps": ("Requests of all decode steps.", ()),
    "drafted_proposals": ("Proposals drafted.", ()),
    "verified_rows": ("Rows verified, each request's first among them.", ()),
    "committed_tokens": ("Tokens committed.", ()),
    "verified_proposals": ("Proposals verified, by position.", ("position",)),
    "accepted_proposals": ("Proposals accepted, by position.", ("position",)),
    "chance_verified": ("Proposals verified, by the chance that the draft gave them.", ("at_least",)),
    "chance_expected": ("Proposals that come true by that chance.", ("at_least",)),
    "chance_accepted": ("Proposals that came true.", ("at_least",)),
    "copied_proposals": ("Proposals copied from the text of their request.", ()),
    "copied_beyond_blocks": ("Copied proposals behind the proposals of a block.", ()),
    "accepted_copies": ("Copied proposals accepted.", ()),
    "timed_steps": ("Decode steps that were timed.", ()),
    "timed_step_seconds": ("Seconds of timed steps, by part.", ("part",)),
}
GAUGES: dict[str, tuple[str, Sequence[str]]] = {
    "accept_length": ("Committed tokens of a request-step, since the last decode line.", ()),
    "drafting_accept_length": ("The same of request-steps that verified a proposal.", ()),
    "accept_rate": ("Accepted over verified proposals, since the last decode line.", ()),
    "accept_length_after_warm_up": ("Estimated accept length of the first steps above chance level.", ()),
    "estimated_over_width_1": ("Estimated tokens per second over those of steps of width 1, by step times.", ()),
    "estimated_over_block": ("Estimated tokens per second over those of whole blocks, by step times.", ()),
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
        counter, gauge = collector._counter_cls or Counter, collector._gauge_cls or Gauge
        self._metrics = {
            name: counter(name=f"dflash_{name}", documentation=text, labelnames=[*self._labels, *own])
            for name, (text, own) in COUNTERS.items()
        }
        self._metrics |= {
            name: gauge(
                name=f"dflash_{name}",
                documentation=text,
                labelnames=[*self._labels, *own],
                multiprocess_mode="mostrecent",
            )
            for name, (text, own) in GAUGES.items()
        }
        self._counted: dict[tuple[str, tuple[Any, ...]], float] = {}
        self._of = functools.cache(self._with_labels)

    def update(
        self,
        totals: Totals,
        latest: Totals,
        shapes: Mapping[Shape, int],
        split: StepSplit,
        estimates: tuple[float, float] | None,
        alarm: Alarm,
    ) -> None:
        """totals, shapes, split: since start-up. latest: since the last update. estimates: see
        `WidthMetrics.estimates`; None where the width is fixed."""
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
        self._count("timed_steps", split.timed)
        for part, seconds in split.seconds.items():
            self._count("timed_step_seconds", seconds, part)
        self._set("accept_length", latest.accept_length)
        if latest.verified[:1].any():
            self._set("drafting_accept_length", latest.drafting_accept_length)
        self._set("accept_rate", latest.accept_rate)
        self._rate_of_sglang.labels(**self._labels).set(latest.accept_rate)
        if alarm.before is not None:
            self._set("accept_length_after_warm_up", alarm.before.accept_length)
        if estimates is not None:
            self._set("estimated_over_width_1", estimates[0])
            self._set("estimated_over_block", estimates[1])
        for state in STATES:
            self._set("alarm", float(state == alarm.state), state)

    def calibrate(self, calibration: Mapping[str, Sequence[float]]) -> None:
        """calibration: see `Confidence.snapshot`, since start-up."""
        for name in ("verified", "expected", "accepted"):
            for least, proposals in zip(calibration["from"], calibration[name], strict=True):
                self._count(f"chance_{name}", proposals, least)

    def count_copies(self, copies: Mapping[str, float]) -> None:
        """copies: see `Copies.snapshot`."""
        self._count("copied_proposals", copies["proposed"])
        self._count("copied_beyond_blocks", copies["beyond_block"])
        self._count("accepted_copies", copies["accepted"])

    def _count(self, name: str, value: float, *own: Any) -> None:
        """Raise a counter to its value since start-up."""
        before = self._counted.get((name, own), 0)
        self._of(name, own).inc(value - before)
        self._counted[name, own] = value

    def _set(self, name: str, value: float, *own: Any) -> None:
        self._of(name, own).set(value)

    def _with_labels(self, name: str, own: tuple[Any, ...]) -> Any:
        metric, (_, names) = self._metrics[name], (COUNTERS | GAUGES)[name]
        return metric.labels(**self._labels, **dict(zip(names, own, strict=True)))
