"""WidthPolicy: what the worker asks for the width of the next step, and tells of those that came back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_sglang.scheduling.width.acceptance import Acceptance
from dflash_sglang.scheduling.width.choice import Choice, Chooser
from dflash_sglang.scheduling.width.config import PLAIN, WidthConfig
from dflash_sglang.scheduling.width.group import Group
from dflash_sglang.scheduling.width.metrics import WidthMetrics
from dflash_sglang.scheduling.width.step_times import StepTimes, StepTimesError

MOST_IN_FLIGHT = 8  # steps that were chosen and not verified; overlap scheduling has at most two


@dataclass(frozen=True)
class Decision:
    """Width of one step. `probe`: tried for this step alone; `reason` as in `choice.Choice`."""

    step: int
    width: int
    probe: bool
    reason: str


@dataclass(frozen=True)
class _InFlight:
    step: int
    slots: np.ndarray
    width: int
    bucket: int
    context_tokens: float


class WidthPolicy:
    """One width for every step of the whole batch.

    At start-up: `step_times.record` for every cell of `startup_cells`, then `start`. Serving: `admit` when a
    request is prefilled, `choose` before each decode step, `verified` when its result is on the host, in the order
    of the steps. Overlap scheduling chooses a step or two ahead of what it was told; a result that comes back
    after its request's slot was given away is dropped.

    All ranks of a group that must choose alike make the same calls in the same order; only `seconds` may differ
    (`group.Group`). Nothing here reads a clock or draws.
    """

    def __init__(
        self,
        config: WidthConfig,
        block: int,
        buckets: Sequence[int],
        max_requests: int,
        group: Group | None = None,
    ):
        """`block`: verify width of the served block; `buckets`: captured batch sizes, the largest at least
        `max_requests`; requests are named by their slots in [0, max_requests]."""
        if buckets[-1] < max_requests:
            raise StepTimesError(
                f"buckets end at {buckets[-1]}: expected at least max_requests={max_requests}. Add the batch "
                "sizes that run without a graph."
            )
        self.config = config
        self.widths = config.states(block)
        self.step_times = StepTimes(buckets, self.widths)
        self.acceptance = Acceptance(
            self.widths, max_requests + 1, config.prior_acceptance, config.prior_strength, config.memory
        )
        self.metrics = WidthMetrics(self.widths)
        self._chooser = Chooser(self.widths, config.margin, config.probe_budget)
        self._group = group or Group()
        self._step = 0
        self._in_flight: deque[_InFlight] = deque()
        self._unshared: list[tuple[_InFlight, float]] = []

    def start(self) -> None:
        """Ends start-up: builds the table of step times, rank 0's for every rank."""
        if self.config.fixed is not None:
            return
        self.step_times.fit()
        if self._group.share_times is not None:
            self.step_times.load(self._group.share_times(self.step_times.table()))

    def admit(self, slots: np.ndarray, max_widths: Sequence[int] | None = None) -> None:
        """New requests in these slots [n], with the `max_width` of each."""
        self.acceptance.admit(slots, self._step, max_widths)

    def choose(self, slots: np.ndarray, context_tokens: int) -> Decision:
        """The width of the next step for the requests in `slots` [n] (none: another rank has requests), whose
        contexts have `context_tokens` together. Raises RuntimeError if steps are chosen and never verified."""
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            raise RuntimeError(
                f"{MOST_IN_FLIGHT} steps were chosen and none verified: expected `verified` once per `choose`."
            )
        slots = np.array(slots, np.intp)
        if self.config.fixed is not None:
            choice, bucket, context = self._fixed(slots), 0, 0.0
        else:
            self._share_times()
            choice, bucket, context = self._choose(slots, context_tokens)
        step, self._step = self._step, self._step + 1
        self._in_flight.append(_InFlight(step, slots, choice.width, bucket, context))
        self.metrics.steps[choice.width] += 1
        self.metrics.probes[choice.width] += choice.probe
        if choice.reason not in ("hold", "probe"):
            self.metrics.changes += choice.reason != "start"
            self.metrics.last_change = choice.reason
        return Decision(step, self.widths[choice.width], choice.probe, choice.reason)

    def verified(self, accepted: Sequence[int] | np.ndarray, seconds: float | None = None) -> None:
        """The oldest step that is in flight came back: `accepted` [n] proposals, and how long it took.

        `seconds`: from the end of the step before to the end of this one, so that the host's share counts; None
        where something else ran in between (a prefill). Raises ValueError if [n] is not that step's.
        """
        if not self._in_flight:
            raise ValueError("verified: no step is in flight: expected one `verified` per `choose`.")
        done = self._in_flight.popleft()
        if len(accepted) != len(done.slots):
            raise ValueError(
                f"verified: {len(accepted)} results for step {done.step}: expected {len(done.slots)}, one for "
                "each of its requests, and results in the order of the steps."
            )
        if seconds is not None:
            self.metrics.seconds[done.width] += seconds
        if self.config.fixed is not None:
            return
        self.acceptance.observe(done.step, done.slots, done.width, np.asarray(accepted, np.int64))
        if self._group.share_times is not None:
            self._unshared.append((done, np.nan if seconds is None else seconds))
        elif seconds is not None:
            self.step_times.observe(done.bucket, done.width, done.context_tokens, seconds)

    def _fixed(self, slots: np.ndarray) -> Choice:
        fixed = len(self.widths) - 1
        width = fixed if self.acceptance.cap(slots) >= self.widths[fixed] else 0
        return Choice(width, width, "hold" if self._step else "start")

    def _choose(self, slots: np.ndarray, context_tokens: float) -> tuple[Choice, int, float]:
        batch, accepted, limit = len(slots), self.acceptance.expected(slots), self.acceptance.cap(slots)
        requests, unknown = float(batch), self.acceptance.unknown(slots) if self._chooser.plain else 0.0
        if self._group.gather_loads is not None:
            row = np.array([batch, context_tokens, limit if batch else PLAIN, unknown, *accepted], np.float64)
            loads = self._group.gather_loads(row)
            # Ranks pad to the largest batch among them, and wait for the one with the longest contexts.
            batch, context_tokens, limit = int(loads[:, 0].max()), float(loads[:, 1].max()), int(loads[:, 2].max())
            requests, unknown = float(loads[:, 0].sum()), float(loads[:, 3].sum())
            accepted = loads[:, 4:].sum(axis=0).tolist()
        if not batch:  # nothing is known of the load yet
            limit, requests, unknown = self.widths[-1], 1.0, 0.0
            accepted = self.acceptance.expected_of_a_new_request()
        bucket = self.step_times.bucket(max(batch, 1))
        seconds = self.step_times.seconds(bucket, context_tokens)
        committed = [requests + count for count in accepted]
        choice = self._chooser.choose(bucket, limit, committed, seconds, unknown / requests)
        rate = committed[choice.width] / seconds[choice.width]
        self.metrics.gain_over_plain = rate * seconds[0] / committed[0]
        self.metrics.gain_over_full = rate * seconds[-1] / committed[-1]
        return choice, bucket, context_tokens

    def _share_times(self) -> None:
        """Every `exchange_every` choices, what rank 0 measured since corrects the table of every rank."""
        if self._group.share_times is None or self._step % self.config.exchange_every or not self._step:
            return
        row = np.full(self.config.exchange_every + MOST_IN_FLIGHT, np.nan)
        row[: len(self._unshared)] = [seconds for _, seconds in self._unshared]
        shared = self._group.share_times(row).tolist()
        for (done, _), seconds in zip(self._unshared, shared, strict=False):
            self.step_times.observe(done.bucket, done.width, done.context_tokens, seconds)
        self._unshared.clear()
