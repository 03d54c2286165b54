"""Observer: what the width controller tells of steps, and what operators get of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from dflash_sglang.observe.alarm import Alarm, Causes
from dflash_sglang.observe.counts import Counts, DoneStep, Shape, Totals
from dflash_sglang.observe.series import Series

logger = logging.getLogger(__name__)

POSITIONS = 8  # that the decode line shows


class Observer:
    """Counts steps as their results reach the host; tells of them when SGLang writes its decode line."""

    def __init__(
        self,
        counts: Counts,
        alarm: Alarm,
        causes: Causes,
        over_width_1: Callable[[], float] | None = None,
        copies: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """over_width_1: estimated tokens/s over those of steps of width 1, None where the width is fixed.
        copies: what came of them (`Copies.snapshot`), None where nothing is copied."""
        self.counts, self.block = counts, alarm.block
        self._alarm, self._causes, self._over_width_1, self._copies = alarm, causes, over_width_1, copies
        self._series: Series | None = None
        self._told = self.counts.totals()  # of the latest line
        self._told_shapes = self.counts.shapes

    def verified(self, step: DoneStep, context_tokens: int) -> None:
        """context_tokens: of the step's requests together."""
        self._causes.context_tokens += context_tokens
        self.counts.add(step)

    def report(self, reporter: Any) -> None:
        """Write the log line, judge acceptance and renew the Prometheus series, on the ranks on which SGLang does.

        reporter: SGLang's SchedulerMetricsReporter, which has just written its decode line.
        """
        now, shapes = self.counts.totals(), self.counts.shapes
        steps = now.since(self._told)
        if not steps.requests:
            return
        raised = self._alarm.observe(steps, time.monotonic())
        if reporter.is_stats_logging_rank:
            told = self._told_shapes
            logger.info("%s", decode_line(steps, {of: count - told.get(of, 0) for of, count in shapes.items()}))
            if raised is not None:
                logger.warning("%s", self._causes.line(raised, now.requests))
        if reporter.current_scheduler_metrics_enabled:
            if self._series is None:
                self._series = Series(reporter.metrics_collector)
            reporter.stats.spec_accept_rate = steps.accept_rate  # for /v1/loads
            over_width_1 = None if self._over_width_1 is None else self._over_width_1()
            copies = None if self._copies is None else self._copies()
            self._series.update(now, steps, shapes, self._alarm, over_width_1, copies)
        self._told, self._told_shapes = now, shapes

    def snapshot(self) -> dict[str, Any]:
        """`dflash_acceptance` of /server_info, counts since start-up."""
        return {**self.counts.snapshot(), "alarm": self._alarm.state}


def decode_line(steps: Totals, shapes: Mapping[Shape, int]) -> str:
    """`DFlash decode, ...`, the line below SGLang's decode line: what the steps since the last one did.

    shapes: how many of them had each shape.
    """
    tried = int((steps.verified[:POSITIONS] > 0).sum())
    chances = steps.accepted[:tried] / steps.verified[:tried]
    widths: Counter[int] = Counter()
    for shape, count in shapes.items():
        widths[shape.width] += count
    return (
        f"DFlash decode, #steps: {steps.steps}, accept len: {steps.accept_length:.2f}, "
        f"accept rate: {steps.accept_rate:.2f}, "
        f"by position: {' '.join(f'{chance:.2f}' for chance in chances) or 'none verified'}, "
        f"rows per token: {steps.rows / steps.committed:.2f}, "
        f"width: {' '.join(f'{width}x{count}' for width, count in sorted(widths.items()) if count)}"
    )
