"""Observer: what the width controller tells of steps, and what operators get of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_sglang.observe.alarm import Alarm
from dflash_sglang.observe.causes import Causes
from dflash_sglang.observe.counts import Counts, DoneStep, Shape, Totals
from dflash_sglang.observe.series import Series
from dflash_sglang.observe.step_split import StepSplit

logger = logging.getLogger(__name__)

POSITIONS = 8  # that the decode line shows


class Observer:
    """Counts steps as their results reach the host; tells of them when SGLang writes its decode line."""

    def __init__(
        self,
        counts: Counts,
        alarm: Alarm,
        causes: Causes,
        estimates: Callable[[], tuple[float, float]] | None,
        split: StepSplit,
        calibration: Callable[[], Mapping[str, Sequence[float]]] | None = None,
        copies: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """estimates: the width policy's of tokens per second, see `WidthMetrics.estimates`;
        calibration: of the draft's probabilities (`Confidence.snapshot`). None where the width is fixed.
        copies: what came of them (`Copies.snapshot`), None where nothing is copied."""
        self.split, self.counts, self.block = split, counts, alarm.block
        self._alarm, self._causes, self._estimates, self._calibration = alarm, causes, estimates, calibration
        self._copies = copies
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
        told = self._told_shapes
        new = {shape: more for shape, count in shapes.items() if (more := count - told.get(shape, 0))}
        raised = self._alarm.observe(steps, self.counts.chosen_plain(new), time.monotonic())
        if reporter.is_stats_logging_rank:
            logger.info("%s", decode_line(steps, new))
            if raised is not None:
                logger.warning("%s", self._causes.line(raised, now.requests))
        if reporter.current_scheduler_metrics_enabled:
            if self._series is None:
                self._series = Series(reporter.metrics_collector)
            reporter.stats.spec_accept_rate = steps.accept_rate  # for /v1/loads
            estimates = None if self._estimates is None else self._estimates()
            self._series.update(now, steps, shapes, self.split, estimates, self._alarm)
            if self._calibration is not None:
                self._series.calibrate(self._calibration())
            if self._copies is not None:
                self._series.count_copies(self._copies())
        self._told, self._told_shapes = now, shapes

    def snapshot(self) -> dict[str, Any]:
        """`dflash_acceptance` of /server_info, counts since start-up."""
        parts = {"timed_steps": self.split.timed, "seconds": dict(self.split.seconds)}
        return {**self.counts.snapshot(), "step_split": parts, "alarm": self._alarm.state}


def decode_line(steps: Totals, shapes: Mapping[Shape, int]) -> str:
    """`DFlash decode, ...`, the line below SGLang's decode line: what the steps since the last one did.

    shapes: how many of them had each shape.
    """
    tried = int((steps.verified[:POSITIONS] > 0).sum())
    chances = steps.accepted[:tried] / steps.verified[:tried]
    widths: dict[int, int] = {}
    for shape, count in shapes.items():
        widths[shape.width] = widths.get(shape.width, 0) + count
    return (
        f"DFlash decode, #steps: {steps.steps}, accept len: {steps.accept_length:.2f}, "
        f"accept rate: {steps.accept_rate:.2f}, "
        f"by position: {' '.join(f'{chance:.2f}' for chance in chances) or 'none verified'}, "
        f"rows per token: {steps.rows / steps.committed:.2f}, "
        f"width: {' '.join(f'{width}x{count}' for width, count in sorted(widths.items()))}"
    )
